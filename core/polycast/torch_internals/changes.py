"""The core's changes to torch's own code: what is replaced, by which function, what is lost without it.

A feature is made when it is first needed, and undone by ``uninstall()``. Plugins have features of their own. Kernels at
dispatch keys and the hooks that torch offers (of optimizers, of modules) change no code. Not in the table:

- user classes: ``setup_context`` of autograd functions (SETUP_CONTEXT: ``region/custom_function.py``);
- what the native engine replaces in C, the methods that make aliases: ``engine/native/alias_hooks.h``.
"""

from typing import Any

from .patcher import Feature


def _feature(
    name: str, lost: str, *changes: tuple[str, str, str], outlives_uninstall: bool = False, **functions: str
) -> Feature:
    """Return a feature of the core, whose functions are given without ``polycast.``.

    A change is a module, a function, and names in the module or, if they begin with ``torch.``, elsewhere.
    """
    full = [
        (
            module,
            tuple([each if each.startswith("torch.") else f"{module}.{each}" for each in names.split()]),
            f"polycast.{function}",
        )
        for module, function, names in changes
    ]
    others: dict[str, Any] = {key: f"polycast.{function}" for key, function in functions.items()}
    return Feature(name, lost, full, outlives_uninstall=outlives_uninstall, **others)


_EAGER = (
    "From the first region with policy= or cache=, or the first register_op(), on, compiled functions run eagerly, "
    "which is slower: use a torch that polycast supports."
)
GUARDS = _feature(
    "guards",
    _EAGER,
    (
        "torch._dynamo",
        "compilers.guards:guard_dynamo",
        "output_graph.OutputGraph.init_ambient_guards guards.CheckFunctionManager.compile_check_fn "
        "guards.GuardManagerWrapper.check",
    ),
    on_refusal="compilers.guards:run_eagerly",
    on_undo="compilers.guards:stop_eager",
)
CACHE_KEYS = _feature(
    "keys of caches",
    _EAGER,
    (
        "torch._functorch._aot_autograd.autograd_cache",
        "compilers.cache_key:extend_autograds",
        "AOTAutogradCacheDetails.__init__",
    ),
    ("torch._inductor.codecache", "compilers.cache_key:extend_inductors", "FxGraphHashDetails.__init__"),
    on_refusal="compilers.guards:run_eagerly",
    on_undo="compilers.guards:stop_eager",
)
BACKWARD = _feature(
    "backward",
    "In compiled code, gradients of ops that policies keep in float32 are computed in the fast dtype.",
    ("torch._functorch._aot_autograd.graph_capture", "compilers.backward:wrap_joint", "create_joint"),
)
NESTED_REGIONS = _feature(
    "nested regions",
    "In a compiled function that calls a torch.compiler.nested_compile_region in several autocast states, calls "
    "may compute as in another of these states.",
    ("torch._guards", "compilers.nested_regions:key_cache_by_state", "InvokeSubgraphCache.*"),
    (
        "torch._higher_order_ops.invoke_subgraph",
        "compilers.nested_regions:trace_again_in_regions",
        "InvokeSubgraphAutogradOp.forward InvokeSubgraphAutogradOp.backward trace_joint_graph_as_bwd",
    ),
    (
        "torch._higher_order_ops.utils",
        "compilers.nested_regions:run_traced_without_autocast",
        "registered_hop_fake_fns",
    ),
)
CACHED_CASTS = _feature(
    "cached casts",
    "Compiled code casts each weight at each call.",
    ("torch._functorch._aot_autograd.graph_capture", "compilers.cached_casts:keep_from_callers", "_create_graph"),
    (
        "torch._inductor.graph",
        "compilers.cached_casts:keep_from_inductor",
        "GraphLowering.output torch._inductor.lowering.lowerings",
    ),
)
REGIONS_IN_GRAPHS = _feature(
    "regions in graphs",
    "Regions with policy=, recipe= or cache= break the graph of compiled functions that enter them.",
    (
        "torch._dynamo.variables.ctx_manager",
        "compilers.graph_regions:let_graphs_hold_overrides",
        "AutocastModeVariable.enter AutocastModeVariable.module_name "
        "AutocastModeVariable.fn_name AutocastModeVariable.python_type",
    ),
    (
        "torch._dynamo.output_graph",
        "compilers.graph_regions:leave_regions_of_failed_graphs",
        "OutputGraph.call_user_compiler",
    ),
    ("torch.fx.passes.split_module", "compilers.graph_regions:let_graphs_with_regions_be_split", "split_module"),
)
GRAPHS_ON_DISK = _feature(
    "graphs on disk",
    "Each process compiles the functions that enter a region, instead of loading their code from disk.",
    (
        "torch._functorch._aot_autograd.autograd_cache",
        "compilers.cache_key:cache_graphs_with_regions",
        "check_node_safe",
    ),
)
CHECKPOINT = _feature(
    "checkpoint",
    "torch.utils.checkpoint does not recompute with the policy= and cache= of its forward. In regions with either, "
    "call checkpoint(polycast.capture().wrap(function), ...).",
    (
        "torch.utils.checkpoint",
        "region.checkpoint:carry_in_checkpoints",
        "CheckpointFunction._backward_cls.run_function _CheckpointFrame.recompute_fn",
    ),
)
COMPILED_MODELS = _feature(
    "compiled models",
    "A model that is compiled while it has a rule itself may run uncompiled after the rule is removed: compile it "
    "again then.",
    ("torch._dynamo", "region.ruled_forward:look_past_rules", "eval_frame.OptimizedModule._initialize"),
)
WRITES = _feature(
    "writes",
    "Cached casts may be stale after writes through DLPack, with the version set back, in dispatch modes or by "
    "CUDA graphs, and torch.utils.swap_tensors refuses weights that have cached casts.",
    (
        "torch.autograd.grad_mode",
        "engine.casts.unversioned_writes:note_hidden_writes",
        "_unsafe_preserve_version_counter.__exit__",
    ),
    ("torch.utils", "engine.casts.unversioned_writes:forget_swapped", "weakref"),
    (
        "torch._C",
        "engine.casts.unversioned_writes:export_aliases",
        "_to_dlpack _to_dlpack_versioned _autograd._get_data_attr",
    ),
    (
        "torch.utils._python_dispatch",
        "engine.casts.unversioned_writes:watch_modes",
        "TorchDispatchMode.__enter__ TorchDispatchMode.__exit__",
    ),
    (
        "torch.cuda.graphs",
        "engine.casts.unversioned_writes:watch_graphs",
        "torch.*.*Graph.capture_begin torch.*.*Graph.capture_end torch.*.*Graph.replay",
    ),
    outlives_uninstall=True,
)
COMPILERS_READS = _feature(
    "reads of the compiler",
    "The first call of newly compiled code drops the cached casts of the weights that it uses.",
    (
        "torch._subclasses.meta_utils",
        "engine.casts.unversioned_writes:keep_while_described",
        "MetaTensorDescriber.describe_tensor",
    ),
    (
        "torch._functorch._aot_autograd.runtime_wrappers",
        "engine.casts.unversioned_writes:keep_in_first_run",
        "torch.*.runtime_wrappers._AnalyzeCustomOpInputOutputMode.__torch_dispatch__",
    ),
    outlives_uninstall=True,
)
SETUP_CONTEXT = _feature("setup_context", "", on_undo="region.custom_function:restore_setup_context")

FOR_OVERRIDES = (GUARDS, CACHE_KEYS, BACKWARD, NESTED_REGIONS, CHECKPOINT)
"""The features that regions with an override or a cache need; torch's autocast state holds neither."""


def overrides_are_guarded() -> bool:
    """Return whether compiled code is guarded on overrides: whether no change was refused that this takes."""
    return not (GUARDS.is_refused() or CACHE_KEYS.is_refused())
