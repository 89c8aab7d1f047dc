"""Words of a run's tables that no run on one process shows."""

from rich.console import Console

from jfsdp.tables import spread


def test_a_spread_names_least_mean_most_and_whose_they_are():
    console = Console(record=True, width=120)
    console.print(spread({"step_s": [0.5, 0.25, 0.75], "compile_s": [60, 70, 65], "peak_memory_bytes": [3 << 30] * 3}))
    rows = [
        line.split() for line in console.export_text().splitlines() if " s " in line or "GiB" in line or "ms" in line
    ]
    assert [" ".join(row) for row in rows] == [
        "step 250.0 ms 1 500.0 ms 750.0 ms 2",
        "compile 60.0 s 0 65.0 s 70.0 s 1",
        "peak memory 3.0 GiB 0 3.0 GiB 3.0 GiB 0",
    ]
