"""A run on paper: memory, traffic and time by formula, what to run, and the same from the compiler."""
