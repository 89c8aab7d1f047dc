"""A family for tests: Llama shapes as published, with few layers, so that a step compiles as the whole model's does."""

from dataclasses import replace

from models import llama
from models.llama import build, flops  # noqa: F401 - what a family offers

presets = {f"8b-{layers}": replace(llama.presets["llama3-8b"], num_layers=layers) for layers in (4, 8)}
