"""A model's own tokenizer: `tokenizer.json` through the `tokenizers` library, and its chat template.

Owns which id ends a document and how a conversation becomes text. What is learned from is decided in
`instructions.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Message = dict[str, str]


class Encoded(NamedTuple):
    """Token ids `[n]` and the characters that each stands for, `[n, 2]` from and to."""

    ids: np.ndarray
    spans: np.ndarray


class Tokenizer:
    """The tokenizer of a Hugging Face folder.

    Raises: ValueError for a folder without one, ImportError where the library is not installed.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{self.folder} has no tokenizer.json. Name the folder of a model with its tokenizer.")
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(f"reading {path} needs `tokenizers`: pip install 'jfsdp[finetune]'.") from error
        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self._config = _read_json(self.folder / "tokenizer_config.json")

    @property
    def size(self) -> int:
        """Ids run from 0 to this, exclusive."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def end(self) -> int:
        """The id that ends a document.

        Raises: ValueError where the folder does not say.
        """
        if (name := self._special("eos_token")) is not None and (
            found := self._tokenizer.token_to_id(name)
        ) is not None:
            return found
        for file in ("generation_config.json", "config.json"):
            found = _read_json(self.folder / file).get("eos_token_id")
            if found is not None:
                return found[0] if isinstance(found, list) else found
        raise ValueError(f'{self.folder} does not say what ends a text. Set "eos_token" in its tokenizer_config.json.')

    def encode(self, text: str, *, special: bool = True) -> Encoded:
        """special: add what the tokenizer puts around a text, such as a start token; a chat template writes its own."""
        one = self._tokenizer.encode(text, add_special_tokens=special)
        return Encoded(np.array(one.ids, np.int32), np.array(one.offsets, np.int32).reshape(-1, 2))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def render(self, messages: Sequence[Message], *, prompts: bool = False) -> str:
        """A conversation as the model's chat template writes it.

        prompts: end with what the template puts before an answer.
        Raises: ValueError where there is no template or it refuses the conversation.
        """
        import jinja2

        special = {name: self._special(name) or "" for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompts, **special)
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template of {self.folder} refuses a conversation: {error}") from error

    @cached_property
    def _template(self):
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        file = self.folder / "chat_template.jinja"
        template = file.read_text() if file.is_file() else self._config.get("chat_template")
        if isinstance(template, list):  # several by name
            template = {one["name"]: one["template"] for one in template}.get("default")
        if template is None:
            raise ValueError(
                f"{self.folder} has no chat template, so messages cannot be written as its model expects them. Use a "
                'chat model\'s folder, or lines with "prompt" and "completion".'
            )
        # As transformers compiles them, so that a template means the same.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        return environment.from_string(template)

    def _special(self, name: str) -> str | None:
        value = self._config.get(name)
        return value["content"] if isinstance(value, dict) else value


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _refuse(message: str):
    import jinja2

    raise jinja2.TemplateError(message)
