"""Which problems Blackwell's indexer kernel takes, and how it is launched: host logic, no GPU."""

from __future__ import annotations

import pytest
import torch

from mlakit import indexer_logits
from mlakit.dispatch import selection
from mlakit.dispatch.checks import UnsupportedError
from mlakit.dispatch.specs import Problem, Use, pretending
from mlakit.kernels.blackwell import support
from mlakit.kernels.blackwell.device.configs import OTHER_SMEM_BYTES, SMEM_BYTES
from mlakit.kernels.blackwell.indexer.configs import (
    PART,
    PRODUCT_COLUMNS,
    WARPGROUPS,
    IndexerConfig,
    pick_config,
)
from mlakit.model.geometry import RowShape
from mlakit.tools.compile.configurations import BLACKWELL
from mlakit.tools.prove import cases_of
from tests.kernels.blackwell.test_sparse_dispatch import Launched
from tests.kernels.hopper.test_indexer import LOOSE, PAGES, arguments, seen_once, walk

E4M3 = "torch.float8_e4m3fn"
BLOCKS = {64: (1, 2, 4), 32: (1, 2, 4, 8)}  # tokens of a block, by padded heads
CONFIGS = {
    (heads, tokens): pick_config(heads=heads, tokens=tokens, batch=1)
    for heads, sizes in BLOCKS.items()
    for tokens in sizes
}
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=map(str, CONFIGS))


@pytest.fixture(autouse=True)
def triton(monkeypatch):
    """A Triton that can compile the kernel, whichever is installed."""
    monkeypatch.setattr(support, "version", lambda package: "3.9.0")


def problem(**fields: object) -> Problem:
    given = {"dtype": E4M3, "format": "fp8_token", "heads": 64, "page_size": 64, "mask": "causal"}
    return Problem("cuda", **{"arch": 100, "row": RowShape(128, 0), **given, **fields})


@pytest.mark.parametrize("arch", [100, 103])
@pytest.mark.parametrize(
    "fields", [{}, {"heads": 1}, {"heads": 33}, {"mask": "null"}, {"page_size": 192}], ids=str
)
def test_problems_that_it_takes(fields, arch):
    asked = problem(arch=arch, **fields)
    assert selection.select("indexer_logits", asked, "blackwell").name == "blackwell"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"arch": 90}, "needs sm_100 or sm_103, got sm_90"),
        ({"arch": 120}, "needs sm_100 or sm_103, got sm_120"),
        ({"format": "bf16"}, "needs keys of fp8_token, got bf16"),
        ({"dtype": "torch.bfloat16"}, f"needs queries of {E4M3}, got torch.bfloat16"),
        ({"heads": 65}, "needs 1 to 64 heads, got 65"),
        ({"heads": 0}, "needs 1 to 64 heads, got 0"),
        ({"page_size": 32}, "needs pages of a multiple of 64 keys, got 32"),
        (
            {"row": RowShape(64, 64)},
            "needs keys of 128 columns, none of them rotated, got 64 + 64 columns",
        ),
        ({"mask": "chunked"}, "needs a mask of null or causal, got chunked"),
        ({"uses": (Use.FLAT_PAGE_TABLE,)}, "takes no flat page table"),
    ],
    ids=str,
)
def test_reasons(fields, reason):
    assert selection.explain("indexer_logits", problem(**fields))["blackwell"] == reason


@pytest.mark.parametrize("use", LOOSE)
def test_tensors_that_tma_cannot_address(use):
    given = arguments(PAGES) | LOOSE[use]
    refused = pytest.raises(UnsupportedError, match=f"takes no {use.partition(',')[0]}")
    with pretending(100, 148), refused:
        indexer_logits(**given, backend="blackwell")


def test_it_needs_a_proof():
    (spec,) = (spec for spec in selection.specs("indexer_logits") if spec.name == "blackwell")
    variants = [spec.variant(problem(heads=heads)) for heads in (1, 32, 33, 64)]
    assert variants == [f"causal, {padded} heads" for padded in (32, 32, 64, 64)]
    assert selection.select("indexer_logits", problem()).backend == "triton"


def config_of(case) -> IndexerConfig:
    return pick_config(heads=case.heads, tokens=sum(case.q_lens), batch=len(case.q_lens))


def test_its_configurations_and_a_check_of_each_have_every_token_block():
    cases = [case for name, case in BLACKWELL.items() if name.startswith("blackwell-indexer-")]
    assert {config_of(case) for case in cases} == set(CONFIGS.values())
    assert cases[0].heads == 64
    for case in cases:
        checked = list(cases_of(case))
        of_heads = {config for config in CONFIGS.values() if config.HEADS == config_of(case).HEADS}
        assert {config_of(each) for each in checked} == of_heads
        for each in checked[1:9]:
            assert sum(kv_len // config_of(each).KEYS for kv_len in each.kv_lens) >= 148
        single = [len(each.q_lens) == 1 and each.q_lens[0] <= 4 for each in checked[1:9]]
        assert single.count(True) == 3


@EVERY_CONFIG
def test_configs_fit_an_sm(config):
    assert config.smem_bytes + OTHER_SMEM_BYTES <= SMEM_BYTES
    assert config.STAGES >= 5
    parts = config.KEYS // PART
    assert parts in (1, WARPGROUPS)
    # warpgroups share out the parts of a key tile, or else the tokens of a block
    assert config.TOKENS * parts == config.WG_TOKENS * WARPGROUPS
    assert config.TOKENS * config.HEADS <= PRODUCT_COLUMNS
    assert 2 * parts * config.TOKENS * config.HEADS <= 512  # columns of tensor memory
    assert config.WG_TOKENS * config.HEADS <= 128  # weights in registers
    registers = 3 * config.MAX_REGISTERS - config.SUM_REGISTERS - config.OTHER_REGISTERS
    assert registers >= config.SUM_REGISTERS
    assert 3 * 128 * config.MAX_REGISTERS <= 65536
    # sums over token blocks have a closed form only if each divides a tile
    assert config.KEYS % config.TOKENS == config.FILL_COLUMNS % config.TOKENS == 0


@pytest.mark.parametrize(
    ("tokens", "batch", "block"),
    [(7, 7, 1), (8, 7, 2), (14, 7, 2), (15, 7, 4), (28, 7, 4), (29, 7, 8), (2048, 1, 8)],
)
def test_token_blocks_are_as_large_as_a_request_has_queries(tokens, batch, block):
    for heads, padded in ((1, 32), (32, 32), (33, 64), (64, 64)):
        config = pick_config(heads=heads, tokens=tokens, batch=batch)
        assert (min(block, 256 // padded), padded) == (config.TOKENS, config.HEADS)


@pytest.mark.parametrize("config", [CONFIGS[64, 4], CONFIGS[32, 8]], ids=["64", "32"])
def test_every_logit_is_written_once(config):
    pytest.importorskip("triton")
    kv_lens, q_lens = (127, 128, 129, 300, 0, 1), (1, 2, 9, 40, 0, 1)
    written, shares = walk(config, kv_lens, q_lens, 430, True, 7, torch.int32)
    assert max(shares) - min(shares) <= 1
    assert torch.equal(written, seen_once(kv_lens, q_lens, 430, True))


@pytest.fixture
def launched(monkeypatch):
    pytest.importorskip("triton", minversion="3.9", reason="Blackwell's kernels need Triton 3.9")
    from mlakit.kernels.hopper.indexer import calls
    from mlakit.kernels.launch import SHARED_BYTES, Target

    launches = Launched()
    monkeypatch.setattr(calls, "launch", launches)
    monkeypatch.setattr(calls, "target", lambda device: Target(100, 148, SHARED_BYTES[100]))
    with pretending(100, 148):
        yield launches


def test_a_launch(launched):
    indexer_logits(**arguments(PAGES), max_kv_len=100, backend="blackwell")
    ((kernel, grid, given),) = launched
    assert kernel.__name__ == "indexer_logits_m128_kernel"
    assert grid == (148,)
    assert given["CONFIG"] == CONFIGS[32, 1]
    assert list(given["q"].block_shape) == [1, 32, 128]
    assert list(given["keys"].block_shape) == [64, 128]
    assert list(given["scales"].block_shape) == [64]
    assert given["maxnreg"] == given["CONFIG"].MAX_REGISTERS


def test_without_columns_no_kernel_is_started(launched):
    given = arguments(PAGES)
    given["kv_lens"] = torch.zeros(2, dtype=torch.int32)
    assert indexer_logits(**given, max_kv_len=0, backend="blackwell").shape == (2, 0)
    assert launched == []
