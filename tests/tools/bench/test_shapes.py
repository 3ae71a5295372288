"""Shapes on the command line: their meaning, and the messages for invalid ones."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from mlakit.tools import cli
from mlakit.tools.bench import command
from mlakit.tools.bench.shapes import Batch, Group, Shape, product_sizes
from tests.tools.bench.fakes import pretend_gpu


def workloads(suite: str, text: str, **options: object):
    return command._workloads(suite, Shape(text, **options), 0)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("128q1s8k", [(128, 1, 8192)]),
        ("1Q2S1M", [(1, 2, 1 << 20)]),
        ("2kq1s1000", [(2048, 1, 1000)]),
        ("64q1s4k+2q1s64k", [(64, 1, 4096), (2, 1, 65536)]),
        ("3q1s4k, 2q5s7", [(3, 1, 4096), (2, 5, 7)]),
    ],
)
def test_batches_are_read(text, groups):
    assert Batch.parse(text) == Batch(tuple(Group(*each) for each in groups))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "<count>q<q_len>s<kv_len>"),
        ("128", "got '128'"),
        ("128q1", "got '128q1'"),
        ("4q1s8k+oops", "got 'oops' in '4q1s8k+oops'"),
        ("4q1s8g", "got '4q1s8g'"),
        ("0q1s8", "at least 1"),
        ("4q0s8", "at least 1"),
        ("4q9s8", "at least q_len"),
    ],
)
def test_what_is_no_batch_is_refused(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Batch.parse(text)


def test_a_batch_knows_its_requests():
    batch = Batch.parse("2q1s4k+1q3s100")
    assert (batch.q_lens, batch.kv_lens) == ((1, 1, 3), (4096, 4096, 100))
    assert (batch.starts, batch.tokens, batch.size) == ((0, 1, 2, 5), 5, 3)
    assert batch.checked_requests == [0, 1, 2]
    assert (batch.is_even, Batch.parse("2q1s4k+1q1s1").is_even) == (False, True)
    assert Batch.parse(str(batch)) == batch
    assert batch.label(16) == "2q1s4k+1q3s100-h16"
    assert Batch.of(3, 2, 77).label(8) == "b3-h8-q2-77"


@pytest.mark.parametrize(
    ("suite", "text", "options", "names"),
    [
        ("decode", "128q1s8k", {"heads": 16}, ["decode-bf16-b128-h16-8192"]),
        (
            "decode",
            "64q1s4k+2q1s64k",
            {"format": "fp8_token", "page_size": 128},
            ["decode-fp8_token-64q1s4k+2q1s64k-h128-page128"],
        ),
        (
            "sparse-decode",
            "4q1s8k",
            {"topk": 512},
            ["sparse-decode-fp8_block128-b4-h128-8192-top512"],
        ),
        ("sparse-decode", "4q1s1k", {}, ["sparse-decode-fp8_block128-b4-h128-1024-top1024"]),
        ("sparse-prefill", "1q4ks32k", {}, ["sparse-prefill-bf16-b1-h128-q4096-32768-top2048"]),
        ("prefill", "8q2ks2k", {"causal": False}, ["prefill-bf16-b8-h128-2048-full"]),
        ("prefill", "1q8s8+1q9s9", {"heads": 2}, ["prefill-bf16-1q8s8+1q9s9-h2-causal"]),
        ("norm-rope-quant", "64q1s1", {"heads": 8}, ["append-bf16-decode-64-h8"]),
        ("norm-rope-quant", "1q4ks4k", {"format": "fp8"}, ["append-fp8-prompt-4096-h128"]),
        (
            "indexer",
            "64q1s8k",
            {},
            ["indexer-logits-b64-h64-8192", "indexer-topk-64x8192-k2048"],
        ),
        ("branch", "2q1s4k", {"heads": 16}, ["step-bf16-b2-h16-4096"]),
        (
            "layer",
            "2q1s4k",
            {"heads": 16, "format": "fp8"},
            [
                f"layer-{model}-{weights}-weights-b2-h16-4096-fp8-rows"
                for model in ("v3", "v3.2")
                for weights in ("bf16", "fp8")
            ],
        ),
        ("fp8", "1kx7168x2048", {}, ["scaled-mm-1024x7168x2048"]),
    ],
)
def test_every_suite_has_a_meaning_for_a_shape(suite, text, options, names):
    assert [each.name for each in workloads(suite, text, **options)] == names


@pytest.mark.parametrize(
    ("suite", "text", "options", "said"),
    [
        ("decode", "1q1s1", {"topk": 5}, "suite decode does not take --topk; it takes --heads"),
        ("decode", "1q1s1", {"format": "int4"}, "int4"),
        ("prefill", "1q1s5", {}, "q_len equal to kv_len for prefill"),
        ("prefill", "1q5s5", {"page_size": 5}, "suite prefill does not take --page-size"),
        ("sparse-decode", "1q1s64", {"topk": 65}, "--topk must be at most"),
        ("norm-rope-quant", "2q5s5", {}, "one prompt"),
        ("fp8", "1q1s1", {}, "--shape must be MxNxK"),
        ("fp8", "0x1x1", {}, "at least 1"),
        ("fp8", "1x1x1", {"heads": 1}, "it takes none"),
        ("grid", "1q1s1", {}, "suite grid does not take --shape"),
    ],
)
def test_a_shape_that_a_suite_has_no_meaning_for_is_refused(suite, text, options, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        workloads(suite, text, **options)


def test_sizes_of_a_product_are_read():
    assert product_sizes("4kx7168X1M") == (4096, 7168, 1 << 20)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["decode", "--shape", "12q"], "--shape must be <count>q<q_len>s<kv_len>"),
        (["decode", "--heads", "16"], "--heads needs --shape"),
        (["decode", "--no-causal"], "--causal needs --shape"),
        (["cpu", "--shape", "1q1s1"], "suite cpu does not take --shape"),
        (["decode", "--only", "h77"], "no workload of suite decode has 'h77' in its name"),
        (["decode", "--mode", "warm"], "--mode must be one of cold, b2b, graph, got 'warm'"),
        (["decode", "--host", "--mode", "graph"], "so --mode has no effect"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, said, monkeypatch):
    pretend_gpu(monkeypatch)
    result = CliRunner().invoke(cli.app, ["bench", *arguments])
    assert result.exit_code == 2
    assert said in re.sub(r"[│\s]+", " ", result.output)
