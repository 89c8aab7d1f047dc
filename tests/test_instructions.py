"""Instruction data: what of a conversation is learned from, and how conversations share rows."""

import json

import numpy as np
import pytest

from jfsdp.instructions import is_instructions, load_instructions, pack
from jfsdp.tokenizer import Tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library reads tokenizer.json")

CHATML = """{% for m in messages %}
    {% if m['content'] %}
{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
    {%- endif %}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TALK = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "Grüße: and now?"},
    {"role": "assistant", "content": "Grüße zurück."},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE of a few merges, with ChatML's tokens and template."""
    path = tmp_path_factory.mktemp("tokenizer")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=special)
    model.train_from_iterator([m["content"] for m in TALK] * 5, trainer)
    model.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": CHATML}))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer(folder)


def load(tmp_path, tokenizer, records, seq_len=64, vocab_size=300, held_out=0.0, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(record) if isinstance(record, dict) else record for record in records))
    return load_instructions(path, tokenizer, seq_len=seq_len, vocab_size=vocab_size, held_out=held_out)


def learned(tokenizer, row, segment=1):
    """The text of the targets that count, run by run."""
    keep = row["segments"] == segment
    targets, weights = row["targets"][keep], row["weights"][keep]
    runs = np.split(np.arange(len(targets)), np.flatnonzero(np.diff(weights)) + 1)
    return [
        tokenizer._tokenizer.decode(targets[run].tolist(), skip_special_tokens=False) for run in runs if weights[run[0]]
    ]


def test_only_answers_count_with_what_the_template_ends_them_with(tmp_path, tokenizer):
    rows, _ = load(tmp_path, tokenizer, [{"messages": TALK}], seq_len=128)
    row = rows[0]
    assert learned(tokenizer, row) == ["It is four.<|im_end|>\n", "Grüße zurück.<|im_end|>\n"]
    text = tokenizer.render(TALK)
    ids = tokenizer.encode(text, special=False).ids
    n = len(ids) - 1
    assert row["tokens"][:n].tolist() == ids[:-1].tolist() and row["targets"][:n].tolist() == ids[1:].tolist()
    assert not row["tokens"][n:].any() and not row["weights"][n:].any() and not row["segments"][n:].any()
    assert row["positions"][:n].tolist() == list(range(n))


def test_ids_and_template_are_those_of_transformers(folder, tokenizer):
    transformers = pytest.importorskip("transformers", reason="transformers is the judge of templates")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), chat_template=CHATML, eos_token="<|end|>"
    )
    for prompts in (False, True):
        options = dict(add_generation_prompt=prompts)
        text = tokenizer.render(TALK, prompts=prompts)
        assert text == theirs.apply_chat_template(TALK, tokenize=False, **options)
        ids = theirs.apply_chat_template(TALK, tokenize=True, return_dict=True, **options)["input_ids"]
        assert tokenizer.encode(text, special=False).ids.tolist() == ids
    assert tokenizer.end == theirs.eos_token_id and tokenizer.decode(ids) == theirs.decode(
        ids, skip_special_tokens=True
    )


def test_a_completion_counts_with_its_end_also_where_a_token_straddles(tmp_path, tokenizer):
    """ " is" is one token, so a prompt that ends with the blank shares it with the completion."""
    records = [{"prompt": "What ", "completion": "is two?"}, {"prompt": "What", "completion": " is two?"}]
    assert len(tokenizer.encode(" is").ids) == 1
    rows, _ = load(tmp_path, tokenizer, records)
    assert [learned(tokenizer, rows[0], k) for k in (1, 2)] == [[" is two?<|end|>"]] * 2


def test_an_end_that_the_tokenizer_writes_itself_counts_and_comes_once(tmp_path, folder):
    other = tmp_path / "other"
    other.mkdir()
    model = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = model.token_to_id("<|end|>")
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", end)]
    )
    model.save(str(other / "tokenizer.json"))
    (other / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    rows, _ = load(tmp_path, Tokenizer(other), [{"prompt": "What", "completion": " is two?"}])
    assert learned(Tokenizer(other), rows[0]) == [" is two?<|end|>"]


def test_packed_conversations_are_documents_and_each_comes_once(tmp_path, tokenizer):
    records = [{"prompt": "a" * i, "completion": "b" * (1 + i % 3)} for i in range(1, 30)]
    rows, held = load(tmp_path, tokenizer, records, seq_len=40, held_out=0.2)
    assert (len(rows.examples), len(held.examples)) == (24, 5)
    for dataset in (rows, held):
        assert sorted(k for row in dataset.rows for k in row) == list(range(len(dataset.examples)))
        for i in range(len(dataset)):
            row = dataset[i]
            assert {name: (a.shape, a.dtype) for name, a in row.items()} == {
                "tokens": ((40,), np.int32), "targets": ((40,), np.int32), "weights": ((40,), np.float32),
                "segments": ((40,), np.int32), "positions": ((40,), np.int32),
            }  # fmt: skip
            for segment, k in enumerate(dataset.rows[i], start=1):
                ids, counts = dataset.examples[k]
                keep = row["segments"] == segment
                assert row["tokens"][keep].tolist() == ids[:-1].tolist()
                assert row["positions"][keep].tolist() == list(range(len(ids) - 1))
                assert row["weights"][keep].tolist() == counts[1:].tolist()
    assert "24 conversations" in str(rows)


def test_rows_are_filled_by_the_best_fit():
    assert pack([5, 3, 4, 2, 6], 8) == [[0, 1], [2], [3, 4]]
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 500).tolist()
    rows = pack(lengths, 64)
    assert max(sum(lengths[i] for i in row) for row in rows) <= 64
    assert len(rows) < 1.06 * sum(lengths) / 64  # one behind the other without cutting: 1.3


def test_what_is_longer_than_a_row_is_cut_and_told(tmp_path, tokenizer):
    records = [{"prompt": "a", "completion": "b" * 50}, {"prompt": "a" * 90, "completion": "b"}]
    rows, _ = load(tmp_path, tokenizer, records, seq_len=20)
    assert rows.skipped == {"cut to a row": 2, "without an answer in the row": 1}
    assert rows[0]["weights"].all() and len(rows) == 1


def test_the_first_line_says_whether_a_file_holds_instructions(tmp_path):
    for text, want in (
        ('{"messages": []}', True), ('\n{"prompt": "a", "completion": "b"}', True), ('{"text": "a"}', False),
        ("nothing", False), ("", False), ("[1]", False),
    ):  # fmt: skip
        (tmp_path / "data.jsonl").write_text(text)
        assert is_instructions(tmp_path / "data.jsonl") == want
    assert not is_instructions(None) and not is_instructions(tmp_path) and not is_instructions(tmp_path / "no.jsonl")


@pytest.mark.parametrize("line, mend", [
    ({"text": "a"}, r"line 2: .* is no conversation \('prompt'\). Write \"messages\" with roles and contents"),
    ({"messages": "hello"}, "line 2"),
    ({"prompt": 1, "completion": "a"}, "line 2"),
    ("{", "line 2"),
])  # fmt: skip
def test_a_line_of_another_kind_is_refused_by_number(tmp_path, tokenizer, line, mend):
    with pytest.raises(ValueError, match=mend):
        load(tmp_path, tokenizer, [{"prompt": "a", "completion": "b"}, line])


def test_what_cannot_be_learned_from_is_refused(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="has 0 conversations to train on and 0 to evaluate on. Give more"):
        load(tmp_path, tokenizer, [{"messages": TALK[:1]}])
    with pytest.raises(ValueError, match="line 1: token id .* is outside the model's vocabulary of 100"):
        load(tmp_path, tokenizer, [{"prompt": "a", "completion": "is two"}], vocab_size=100)
    with pytest.raises(ValueError, match="held_out is 1"):
        load(tmp_path, tokenizer, [], held_out=1)


def test_a_template_that_changes_its_mind_is_refused(tmp_path, folder):
    """Such as one that leaves earlier answers out."""
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (other / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(ValueError, match="writes message 1 otherwise once others follow it"):
        load(tmp_path, Tokenizer(other), [{"messages": TALK}])
    (other / "chat_template.jinja").write_text("{{ raise_exception('only one turn') }}")
    with pytest.raises(ValueError, match="refuses a conversation: only one turn"):
        Tokenizer(other).render(TALK)
    (other / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match='has no chat template.*lines with "prompt" and "completion"'):
        Tokenizer(other).render(TALK)
    with pytest.raises(ValueError, match='does not say what ends a text. Set "eos_token"'):
        Tokenizer(other).end  # noqa: B018
    (other / "config.json").write_text('{"eos_token_id": [7, 8]}')
    assert Tokenizer(other).end == 7
    with pytest.raises(ValueError, match="has no tokenizer.json. Name the folder of a model"):
        Tokenizer(tmp_path)
