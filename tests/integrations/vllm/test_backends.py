"""The classes on vLLM's bases: what vLLM selects, and their methods with its tensors."""

from __future__ import annotations

import importlib
import inspect
import pickle
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed; `make test-vllm` installs it")

from mlakit import UnsupportedError, reference
from mlakit.integrations import steps
from mlakit.integrations.vllm import plugin, seams
from tests.integrations.vllm.shapes import (
    INDEX_WIDTH,
    ROW,
    SCALE,
    cache_of,
    index_cache_of,
    index_metadata,
    starts,
)
from tests.integrations.vllm.test_calls import (
    LENGTHS,
    check_selection,
    fill_index,
    index_queries,
    parts,
    queries,
    rows_of,
    sparse_step,
)

CPU = torch.device("cpu")
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _q_scale=torch.tensor(1.0))
SELECTIONS = [
    ("MLAKIT", False, "auto", None),
    ("MLAKIT", False, "fp8", None),
    ("MLAKIT", False, "fp8_ds_mla", None),
    ("MLAKIT", False, "bfloat16", None),
    ("MLAKIT", False, "float16", "a float16 cache needs queries of its dtype"),
    ("MLAKIT", False, "fp8_e5m2", "kv_cache_dtype not supported"),
    ("MLAKIT", True, "auto", "sparse not supported"),
    ("MLAKIT_SPARSE", True, "auto", None),
    ("MLAKIT_SPARSE", True, "fp8", None),
    ("MLAKIT_SPARSE", True, "fp8_ds_mla", None),
    ("MLAKIT_SPARSE", False, "auto", "non-sparse not supported"),
]


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    plugin.register()


def test_every_name_of_the_seams_is_there():
    for name in seams.SEAMS:
        if seams.RELEASES.has(name):
            found = None
            try:
                found = getattr(seams, name) is not None  # a setting may be off
            except AttributeError as error:  # a module that asks for a compiled op when imported
                found = "'_OpNamespace'" in str(error)
            assert found


def test_methods_take_every_argument_by_the_names_of_the_seams():
    from mlakit.integrations.vllm import dense, prefill, sparse

    checked = set()
    for own in (*classes_of(dense), *classes_of(sparse), *classes_of(prefill)):
        for name, seam in seams.SEAMS.items():
            if seam.overrides and issubclass(own, getattr(seams, name)):
                for method, names in seam.overrides.items():
                    taken = inspect.signature(getattr(own, method)).parameters
                    assert set(names) <= set(taken), (own, method)
                    checked.add((own.__name__, method))
    assert ("PrefillBackend", "run_prefill_context_chunk") in checked
    assert ("SparseImpl", "forward_mqa") in checked


def classes_of(module: ModuleType) -> list[type]:
    own = (each for each in vars(module).values() if isinstance(each, type))
    return [each for each in own if each.__module__ == module.__name__]


def test_pages_have_64_tokens_unless_others_are_asked_for():
    from mlakit.integrations.vllm.dense import DenseBackend
    from mlakit.integrations.vllm.sparse import SparseBackend

    for backend in (DenseBackend, SparseBackend):
        assert [backend.get_preferred_block_size(size) for size in (16, 64, 128)] == [64, 64, 128]
        shapes = [backend.get_kv_cache_shape(3, 64, 1, 576, kind) for kind in ("fp8", "fp8_ds_mla")]
        assert shapes == [(3, 64, 576), (3, 64, 656)]


def test_registering_again_changes_nothing():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    before = dict(AttentionBackendEnum.__members__)
    plugin.register()
    assert dict(AttentionBackendEnum.__members__) == before
    assert AttentionBackendEnum["MLAKIT"].get_class().get_name() == "MLAKIT"
    assert AttentionBackendEnum["MLAKIT_SPARSE"].get_class().get_name() == "MLAKIT_SPARSE"


@pytest.fixture(scope="module")
def cuda() -> Any:
    """vLLM's CUDA platform; its compiled modules need a driver."""
    for name in ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch"):
        sys.modules.setdefault(name, ModuleType(name))
    return importlib.import_module("vllm.platforms.cuda").CudaPlatformBase


def select(cuda: Any, monkeypatch: pytest.MonkeyPatch, name: str, major: int, **given: Any) -> str:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    capability = classmethod(lambda cls, device_id=0: DeviceCapability(major, 0))
    monkeypatch.setattr(cuda, "get_device_capability", capability)
    asked = {"head_size": 576, "dtype": torch.bfloat16, "block_size": 64, "use_mla": True} | given
    config = AttentionSelectorConfig(**asked)
    path: str = cuda.get_attn_backend_cls(AttentionBackendEnum[name], config, 128)
    return path


@pytest.mark.parametrize(("name", "use_sparse", "cache", "refusal"), SELECTIONS)
def test_each_name_is_taken_for_its_own_kind_of_model(
    name, use_sparse, cache, refusal, cuda, monkeypatch
):
    given = {"use_sparse": use_sparse, "kv_cache_dtype": cache}
    if refusal is None:
        path = select(cuda, monkeypatch, name, 9, **given)
        assert path == plugin.BACKENDS[name]
    else:
        with pytest.raises(ValueError, match=refusal):
            select(cuda, monkeypatch, name, 9, **given)


def test_old_gpus_and_parallel_prefill_are_refused(cuda, monkeypatch):
    given = {"use_sparse": False, "kv_cache_dtype": "auto"}
    with pytest.raises(ValueError, match="compute capability not supported"):
        select(cuda, monkeypatch, "MLAKIT", 7, **given)
    with pytest.raises(ValueError, match="PCP not supported"):
        select(cuda, monkeypatch, "MLAKIT", 9, use_pcp=True, **given)
    from vllm.v1.attention.selector import AttentionSelectorConfig

    if "use_dcp" not in AttentionSelectorConfig._fields:
        return  # vLLM asks the layers, not the backend
    assert select(cuda, monkeypatch, "MLAKIT", 9, use_dcp=True, **given)
    given["use_sparse"] = True
    assert select(cuda, monkeypatch, "MLAKIT_SPARSE", 9, use_dcp=True, **given)


@pytest.mark.parametrize(
    ("feature", "dense", "sparse"),
    [
        ({"use_batch_invariant": True}, None, "batch invariance not supported"),
        ({"use_non_causal": True}, None, "non-causal attention not supported"),
        ({"has_sink": True}, "attention sinks not supported", None),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_features_are_those_that_tests_show(feature, dense, sparse, cuda, monkeypatch):
    for name, refusal in (("MLAKIT", dense), ("MLAKIT_SPARSE", sparse)):
        given = {"use_sparse": name == "MLAKIT_SPARSE", "kv_cache_dtype": "auto"} | feature
        if refusal is None:
            assert select(cuda, monkeypatch, name, 9, **given) == plugin.BACKENDS[name]
        else:
            with pytest.raises(ValueError, match=refusal):
                select(cuda, monkeypatch, name, 9, **given)


def test_the_configuration_takes_both_names_into_another_process():
    from vllm.config import AttentionConfig

    config = AttentionConfig(backend="MLAKIT", mla_prefill_backend="MLAKIT")
    assert (config.backend.name, config.mla_prefill_backend.name) == ("MLAKIT", "MLAKIT")
    # a spawned process has not loaded its plugins when it unpickles this
    code = (
        "import pickle, sys; a, b = pickle.load(sys.stdin.buffer); "
        "print(a.name, a.get_path(), b.name, b.get_path())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((config.backend, config.mla_prefill_backend)),
        stdout=subprocess.PIPE,
        check=True,
    )
    paths = [plugin.BACKENDS["MLAKIT"], plugin.PREFILL_BACKENDS["MLAKIT"]]
    assert done.stdout.decode().split()[-4:] == ["MLAKIT", paths[0], "MLAKIT", paths[1]]
    assert pickle.loads(pickle.dumps(config.backend)) is config.backend


def impl_of(cls: type, **fields: Any) -> Any:
    """An impl without an engine: its constructor asks for a model's configuration."""
    made = object.__new__(cls)
    made.scale, made.pools = SCALE, steps.Pools(ROW)
    vars(made).update(fields)
    return made


@pytest.mark.parametrize("kind", ["float", "fp8", "fp8_ds_mla"])
@pytest.mark.parametrize("with_prefill", [False, True])
def test_sparse_layers_attend_to_the_buffer_of_the_indexer(kind, with_prefill):
    from mlakit.integrations.vllm.sparse import SparseImpl

    q_lens = [1, 1, 1, 1, 0, 0]
    cache = cache_of(kind, LENGTHS, CPU)
    buffer = sparse_step(cache, q_lens, CPU)
    impl = impl_of(SparseImpl, sinks=None, dcp_world_size=1)
    impl.topk_indices_buffer = buffer
    q = queries(4, CPU)
    # with_prefill: the tokens of two more requests go to dense prefill
    metadata = SimpleNamespace(
        num_reqs=6,
        num_prefills=2 if with_prefill else 0,
        num_decodes=4 if with_prefill else 6,
        num_decode_tokens=4,
        block_table=cache.table,
        query_start_loc=starts([1, 1, 1, 1, 7, 9] if with_prefill else q_lens, CPU),
    )
    out, lse = impl.forward_mqa(parts(q), cache.kv_cache, metadata, LAYER)
    everything = torch.zeros(cache.pool.num_pages * cache.pool.page_size, ROW.width).double()
    for request, rows in enumerate(cache.rows(LENGTHS)):
        everything[cache.slots(request, LENGTHS[request])] = rows
    exact = reference.sparse_mla(
        q, everything, rows_of(cache, buffer, q_lens), softmax_scale=SCALE, v_width=512
    )
    torch.testing.assert_close(out.double(), exact[0], rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(lse.double(), exact[1], rtol=0, atol=1e-3)


def test_the_cache_update_takes_the_bytes_of_an_fp8_layer():
    from mlakit.integrations.vllm.dense import DenseImpl

    cache = cache_of("fp8", [64], CPU)
    impl = impl_of(DenseImpl)
    kv_c, k_pe = torch.randn(2, 512).bfloat16(), torch.randn(2, 1, 64).bfloat16()
    slots = torch.tensor([3, -1])
    impl.do_kv_cache_update(
        kv_c, k_pe, cache.kv_cache.view(torch.uint8), slots, "fp8", cache.k_scale
    )
    impl.do_kv_cache_update(kv_c, k_pe, torch.empty(0), slots, "fp8", cache.k_scale)  # no memory
    row = cache.pool.layer(0).read(torch.tensor([3]))[0]
    want = torch.cat([kv_c[0], k_pe[0, 0]]).float()
    assert bool(((row - want).abs() <= 0.07 * want.abs() + 0.01).all())


def decode_batch_of(monkeypatch: pytest.MonkeyPatch, threshold: int, **given: Any) -> Any:
    """The batch of a decode step whose metadata are built without asking vLLM for a name."""
    from mlakit.integrations.vllm.dense import DenseMetadataBuilder

    builder = DenseMetadataBuilder.__new__(DenseMetadataBuilder)
    fields = {"dcp_world_size": 1, "is_batch_invariant": False, "num_splits": None}
    vars(builder).update(fields, reorder_batch_threshold=threshold)
    monkeypatch.setitem(vars(seams), "__getattr__", lambda name: pytest.fail(f"asks for {name}"))
    made = {
        "block_table_tensor": torch.zeros(2, 3, dtype=torch.int32),
        "seq_lens_device": torch.tensor([5, 9], dtype=torch.int32),
        "max_seq_len": 9,
        "dcp_tot_seq_lens_device": None,
    }
    return builder._build_decode(**(made | given)).batch


def test_a_step_without_drafts_is_built_from_no_lengths_of_queries(monkeypatch):
    begins = starts([1, 1], CPU)
    given = {"query_start_loc_device": begins, "num_decode_tokens": 2}
    for lengths in ({"max_query_len": 1}, {}):  # vLLM from 0.31 on, and before
        unread = {"query_start_loc_cpu": None} | given | lengths
        assert decode_batch_of(monkeypatch, 1, **unread).q_starts is None


@pytest.mark.parametrize(("q_lens", "has_starts"), [([1, 3], True), ([1, 1], False)])
def test_a_step_with_drafts_has_the_starts_of_its_requests(q_lens, has_starts, monkeypatch):
    begins = starts(q_lens, CPU)
    given = {"query_start_loc_cpu": begins, "query_start_loc_device": begins}
    for lengths in ({"max_query_len": max(q_lens)}, {}):
        tokens = {"num_decode_tokens": sum(q_lens)}
        batch = decode_batch_of(monkeypatch, 4, **given, **tokens, **lengths)
        assert (batch.q_starts is begins) == has_starts


@pytest.mark.parametrize("backend", ["dense", "sparse"])
@pytest.mark.parametrize("feature", ["alibi_slopes", "sliding_window", "logits_soft_cap"])
def test_features_that_the_ops_have_not_are_refused(backend, feature):
    from mlakit.integrations.vllm.dense import DenseImpl
    from mlakit.integrations.vllm.sparse import SparseImpl

    impl = {"dense": DenseImpl, "sparse": SparseImpl}[backend]
    features = dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap"))
    features[feature] = 4
    with pytest.raises(UnsupportedError, match=f"^{impl.backend}: {feature} is not supported"):
        impl(16, 576, 1.0, 1, kv_cache_dtype="auto", **features)


def indexer_of(monkeypatch: pytest.MonkeyPatch, backend: str | None, **fields: Any) -> Any:
    """vLLM's SparseAttnIndexer as a model constructs it, in a given configuration."""
    from vllm.model_executor.layers import sparse_attn_indexer as module

    from mlakit.integrations.vllm import indexer

    parallel = SimpleNamespace(
        decode_context_parallel_size=1,
        prefill_context_parallel_size=1,
        pcp_shard_decode_requests=False,
        cp_kv_cache_interleave_size=1,
    )
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=backend, backend_per_kind=None),
        parallel_config=parallel,
        kernel_config=SimpleNamespace(sparse_indexer_topk_backend="auto", enable_jit_warmup=False),
    )
    monkeypatch.setattr(module, "get_current_vllm_config", lambda: config)
    monkeypatch.setitem(vars(seams), "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(module.current_platform, "is_cuda", lambda: True, raising=False)
    monkeypatch.setattr(module, "has_deep_gemm", lambda: False)
    dispatch = lambda self, compile_native=False: self.forward_native  # noqa: E731
    monkeypatch.setattr(module.SparseAttnIndexer, "dispatch_forward", dispatch)
    monkeypatch.setattr(indexer, "INDEXERS", {})
    made = {
        "k_cache": SimpleNamespace(prefix="layer.k_cache"),
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": 64,
        "head_dim": INDEX_WIDTH,
        "max_model_len": 512,
        "max_total_seq_len": 512,
        "topk_indices_buffer": torch.full((230, 64), 10**6, dtype=torch.int32),
    }
    return module.SparseAttnIndexer(**(made | fields))


def test_without_the_sparse_backend_the_indexer_is_vllms(monkeypatch):
    with pytest.raises(RuntimeError, match="requires DeepGEMM"):
        indexer_of(monkeypatch, None)


def test_fp4_keys_are_left_to_vllm(monkeypatch):
    assert not indexer_of(monkeypatch, "MLAKIT_SPARSE", use_fp4_cache=True).runs_here


def test_only_vllms_indexer_needs_the_schedule_of_deep_gemm(monkeypatch):
    from vllm.v1.attention.backends.mla import indexer as metadata

    monkeypatch.setattr(metadata, "has_deep_gemm", lambda: True)
    for is_fp4, is_needed in ((False, False), (False, False), (True, True), (False, False)):
        indexer_of(monkeypatch, "MLAKIT_SPARSE", use_fp4_cache=is_fp4)
        assert metadata.has_deep_gemm() == is_needed


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_indexer_runs_without_deep_gemm(is_fused, monkeypatch):
    from mlakit.integrations.vllm import indexer as ours

    lengths, q_lens = [200, 70, 90, 300, 33], [1, 3, 20, 150, 33]
    cache = index_cache_of(lengths, CPU)
    fill_index(cache, lengths, CPU)
    layer = ModuleType("vllm.models.deepseek_v32.attention")
    layer.sparse_attn_indexer = seams.sparse_attn_indexer  # its import
    monkeypatch.setitem(sys.modules, layer.__name__, layer)
    made = indexer_of(monkeypatch, "MLAKIT_SPARSE")
    assert isinstance(made, ours.Indexer)
    assert made.runs_here
    made.k_cache.kv_cache = cache.everything[:, 1]
    metadata = index_metadata(cache, lengths, q_lens, 2, [slice(0, 203)])
    monkeypatch.setattr(seams, "layer_metadata", lambda name: metadata)
    monkeypatch.setattr(seams, "attends_densely", lambda name: False)
    q, weights = index_queries(sum(q_lens), CPU)
    if is_fused:  # as a DeepSeek-V3.2 layer calls it
        others = (None, None, weights, 128, "ue8m0", 64, INDEX_WIDTH, 512, 512)
        layer.sparse_attn_indexer(
            q, "layer.k_cache", None, q, *others, made.topk_indices_buffer, skip_k_cache_insert=True
        )
    else:
        made.skip_k_cache_insert = True
        made(q, q, None, weights)
    check_selection(
        made.topk_indices_buffer[: sum(q_lens)], q, weights, cache.keys(lengths), q_lens, 64
    )


def test_other_layers_still_call_vllms_indexer(monkeypatch):
    from mlakit.integrations.vllm import indexer as ours

    seen = []
    monkeypatch.setattr(ours, "INDEXERS", {})
    function = ours.selecting_or(lambda *a, **k: seen.append((a, k)))
    function(1, "other", 2, 3, 4, use_pcp=False)
    assert seen == [((1, "other", 2, 3, 4), {"use_pcp": False})]


def test_the_prefill_backend_returns_lse_by_heads():
    from mlakit.integrations.vllm.prefill import PrefillBackend

    made = PrefillBackend(4, SCALE, 512, 64, 64, 64, None)
    made.prepare_metadata(SimpleNamespace(query_start_loc=starts([5, 3], CPU)))
    torch.manual_seed(0)
    q, k, v = torch.randn(8, 4, 128), torch.randn(8, 4, 128), torch.randn(8, 4, 64)
    k[:, :, 64:] = k[:, :1, 64:]
    out, lse = made.run_prefill_new_tokens(q, k, v, True)
    assert lse.shape == (4, 8)
    assert lse.is_contiguous()
    assert torch.equal(made.run_prefill_new_tokens(q, k, v, False), out)
    chunk = SimpleNamespace(query_start_loc=starts([5, 3], CPU), cu_seq_lens=starts([8, 0], CPU))
    context, lse = made.run_prefill_context_chunk(chunk, q, k, v)
    assert bool(lse[:, 5:].isneginf().all())  # no context
    # as vLLM before 0.28 names a chunk
    chunks = SimpleNamespace(cu_seq_lens=[None, starts([8, 0], CPU)])
    metadata = SimpleNamespace(query_start_loc=starts([5, 3], CPU), chunked_context=chunks)
    made.prepare_metadata(metadata)
    assert torch.equal(made.run_prefill_context_chunk(chunk_idx=1, q=q, k=k, v=v)[0], context)
    with pytest.raises(UnsupportedError, match="output_scale must be None"):
        made.run_prefill_new_tokens(q, k, v, False, output_scale=torch.ones(1))
