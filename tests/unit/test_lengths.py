"""Lengths of sequences: distributions and files, what is wrong with them, and how wide batches become."""

from __future__ import annotations

import itertools
from pathlib import Path
from statistics import median

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from autocompile.errors import UserError
from autocompile.knobs import NotApplicable
from autocompile.lengths import epoch, packed, padded, parse_lengths
from autocompile.settings import Settings, study_spec
from autocompile.spec import Task, WorkloadSpec
from autocompile.workloads.batches import IGNORED_LABEL, rows_of
from autocompile.workloads.job import Context, Job, WorkloadError, lengths_of, prepare


def test_a_file_is_replayed_in_its_order(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("30\n7\n\n900\n")
    found = parse_lengths(str(tmp_path / "lengths.txt"))
    assert epoch(found, longest=512, seed=1, n=8) == [30, 7, 512]


def test_distributions_have_their_shape_and_the_seed_decides() -> None:
    uniform = epoch(parse_lengths("uniform:16-512"), longest=512, seed=0, n=2000)
    assert (min(uniform), max(uniform)) == (16, 512) and median(uniform) == pytest.approx(264, abs=20)
    skewed = epoch(parse_lengths("lognormal:100,1"), longest=512, seed=0, n=2000)
    assert median(skewed) == pytest.approx(100, abs=10) and skewed.count(512) > 50
    assert skewed == epoch(parse_lengths("lognormal:100,1"), longest=512, seed=0, n=2000)
    assert skewed != epoch(parse_lengths("lognormal:100,1"), longest=512, seed=1, n=2000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("uniform:512-16", 'expected uniform:LOW-HIGH, .*found "uniform:512-16"', id="the wrong way round"),
        pytest.param("uniform:a-b", "expected uniform", id="no numbers"),
        pytest.param("lognormal:100", "expected uniform", id="one number too few"),
        pytest.param("normal:1,2", "expected uniform", id="no such distribution"),
        pytest.param("none.txt", "lengths: there is no file none.txt", id="no such file"),
        pytest.param("{folder}/words.txt", 'words.txt:2: expected a whole number from 2, found "x"', id="no number"),
        pytest.param("{folder}/empty.txt", "expected one length a line, found none", id="an empty file"),
    ],
)
def test_what_is_wrong_with_lengths(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("12\nx\n")
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match=message):
        parse_lengths(text.format(folder=tmp_path))


@pytest.mark.parametrize(
    ("policy", "width"), [("longest", 70), ("fixed", 512), ("bucket:64", 128), ("bucket:128", 128)]
)
def test_padding(policy: str, width: int) -> None:
    assert padded(70, policy=policy, limit=512) == width
    assert padded(500, policy=policy, limit=505) <= 505


def test_micro_batches_of_an_epoch_end_with_what_is_left(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("5\n9\n3\n20\n4\n")
    workload = WorkloadSpec(model="tiny-bert", sequence_length=16, lengths=str(tmp_path / "lengths.txt"))
    ctx = Context.of(workload, {"micro_batch": 2, "padding": "longest"}, device=torch.device("cpu"), seed=0)
    rows = rows_of(ctx, lengths_of(workload, seed=0))
    assert [(each.lengths, each.width) for each in rows] == [((5, 9), 9), ((3, 16), 16), ((4,), 4)]
    assert ctx.lengths is not None and [next(ctx.lengths) for _ in range(6)] == [5, 9, 3, 16, 4, 5]


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        pytest.param([5, 9, 3, 14, 2], [(5, 9), (3,), (14, 2)], id="in their order"),
        pytest.param([16, 16], [(16,), (16,)], id="nothing fits beside a full one"),
        pytest.param([8, 8, 1], [(8, 8), (1,)], id="to the last token"),
    ],
)
def test_packing_fills_rows(lengths: list[int], rows: list[tuple[int, ...]]) -> None:
    assert packed(lengths, limit=16) == rows


def packed_job(model: str, task: Task | None = None) -> Job:
    workload = WorkloadSpec(model=model, task=task, sequence_length=64, lengths="uniform:5-40", device="cpu")
    config = {"micro_batch": 2, "padding": "packed"}
    return prepare(Context.of(workload, config, device=torch.device("cpu"), seed=0, depth=2), workload)


def test_packed_sequences_have_the_loss_that_each_has_alone() -> None:
    job = packed_job("tiny-llama")
    batch = next(job.batches())
    assert job.mask == "packed" and len(batch["input_ids"]) == 2
    model = job.model.eval()
    losses, tokens, n = [], 0, 0
    for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for start, end in itertools.pairwise(starts):
            document = ids[start:end][None]
            if (document == 0).any():  # padding, whose positions are all 0
                continue
            losses.append(model(input_ids=document, labels=document, use_cache=False).loss * (end - start - 1))
            tokens, n = tokens + end - start, n + end - start - 1
    assert float(job.loss(model, batch).detach()) == pytest.approx(float((sum(losses) / n).detach()), rel=1e-5)
    assert job.tokens(batch) == tokens


def test_an_encoder_sees_packed_sequences_apart_and_predicts_no_padding() -> None:
    job = packed_job("tiny-bert")
    batch = next(job.batches())
    model = job.model.eval()
    first = int((batch["position_ids"][0] == 0).nonzero()[1])
    alone = model(input_ids=batch["input_ids"][:1, :first]).logits
    assert torch.allclose(model(**batch).logits[:1, :first], alone, atol=1e-5)
    assert bool((batch["labels"][batch["input_ids"] == 0] == IGNORED_LABEL).all())


def test_a_classifier_cannot_be_packed() -> None:
    with pytest.raises(NotApplicable, match="padding packed: a classifier has one label for a row"):
        packed_job("tiny-bert", Task.CLASSIFICATION)


def tokenizer_folder(folder: Path) -> str:
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return str(folder)


def test_texts_are_as_long_as_a_tokenizer_says(tmp_path: Path) -> None:
    lines = [
        '{"text": "a b a b"}',
        "",
        '{"prompt": "a a", "completion": "b"}',
        '{"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b b a"}]}',
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    workload = WorkloadSpec(
        model="tiny-llama",
        sequence_length=16,
        lengths=str(tmp_path / "data.jsonl"),
        tokenizer=tokenizer_folder(tmp_path / "tokenizer"),
    )
    assert lengths_of(workload, seed=0) == [4, 3, 5]
    nowhere = workload.model_copy(update={"tokenizer": str(tmp_path / "none")})
    with pytest.raises(WorkloadError, match="there is no such directory"):
        lengths_of(nowhere, seed=0)
    missing = workload.model_copy(update={"tokenizer": str(tmp_path)})
    with pytest.raises(WorkloadError, match=f"tokenizer {tmp_path}: "):
        lengths_of(missing, seed=0)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("[1]", id="no object"),
        pytest.param('{"body": "a"}', id="no text"),
        pytest.param('{"text": 3}', id="a text that is none"),
        pytest.param('{"prompt": "a"}', id="a prompt alone"),
        pytest.param('{"messages": ["a"]}', id="messages that are none"),
    ],
)
def test_a_line_without_a_text_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(UserError, match=r'lengths: .*data.jsonl:2: expected an object with "text", "prompt"'):
        parse_lengths(str(tmp_path / "data.jsonl"))


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"lengths: .*data.jsonl:2: expected JSON: 'utf-8' codec"):
        parse_lengths(str(tmp_path / "data.jsonl"))
    (tmp_path / "data.jsonl").write_text('{"text": "oops\n')
    with pytest.raises(UserError, match=r"lengths: .*data.jsonl:1: expected JSON: Invalid control character"):
        parse_lengths(str(tmp_path / "data.jsonl"))


def test_texts_need_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}')
    with pytest.raises(UserError, match=r"needs --tokenizer HUB_ID\|DIR, since tiny-llama has none"):
        study_spec(Settings(model="tiny-llama", lengths=str(tmp_path / "data.jsonl")))
    with pytest.raises(UserError, match="a tokenizer tells the lengths of texts"):
        study_spec(Settings(model="tiny-llama", lengths="uniform:2-9", tokenizer="gpt2"))
