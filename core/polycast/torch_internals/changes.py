"""The core's changes to torch's own code: what is replaced, by which function, what is lost without it.

A feature is made when it is first needed, and undone by ``uninstall()``. Plugins have features of their own. Kernels at
dispatch keys and the hooks that torch offers (of optimizers, of modules) change no code. Not in the table:

- user classes: ``setup_context`` of autograd functions (SETUP_CONTEXT: ``region/custom_function.py``);
- ALIASES on the native engine, which replaces the functions in C: ``engine/native/alias_hooks.h``.
"""

from .patcher import Change, Feature

_EAGER = (
    "From the first region with policy= or cache=, or the first register_op(), on, compiled functions run eagerly, "
    "which is slower: use a torch that polycast supports."
)
_GRAPH_CAPTURE = "torch._functorch._aot_autograd.graph_capture"
_SUBGRAPHS = "torch._higher_order_ops.invoke_subgraph"

GUARDS = Feature(
    "guards",
    _EAGER,
    (
        Change(
            "torch._dynamo",
            (
                "torch._dynamo.output_graph.OutputGraph.init_ambient_guards",
                "torch._dynamo.guards.CheckFunctionManager.compile_check_fn",
                "torch._dynamo.guards.GuardManagerWrapper.check",
            ),
            "polycast.compilers.guards:guard_dynamo",
        ),
    ),
    on_refusal="polycast.compilers.eager_fallback:start",
    on_undo="polycast.compilers.eager_fallback:stop",
)
CACHE_KEYS = Feature(
    "keys of caches",
    _EAGER,
    (
        Change(
            "torch._functorch._aot_autograd.autograd_cache",
            ("torch._functorch._aot_autograd.autograd_cache.AOTAutogradCacheDetails.__init__",),
            "polycast.compilers.cache_key:extend_autograds",
        ),
        Change(
            "torch._inductor.codecache",
            ("torch._inductor.codecache.FxGraphHashDetails.__init__",),
            "polycast.compilers.cache_key:extend_inductors",
        ),
    ),
    on_refusal="polycast.compilers.eager_fallback:start",
    on_undo="polycast.compilers.eager_fallback:stop",
)
BACKWARD = Feature(
    "backward",
    "In compiled code, gradients of ops that policies keep in float32 are computed in the fast dtype.",
    (Change(_GRAPH_CAPTURE, (f"{_GRAPH_CAPTURE}.create_joint",), "polycast.compilers.backward:wrap_joint"),),
)
NESTED_REGIONS = Feature(
    "nested regions",
    "In a compiled function that calls a torch.compiler.nested_compile_region in several autocast states, calls "
    "may compute as in another of these states.",
    (
        Change(
            "torch._guards",
            ("torch._guards.InvokeSubgraphCache.*",),
            "polycast.compilers.nested_regions:key_cache_by_state",
        ),
        Change(
            _SUBGRAPHS,
            (
                f"{_SUBGRAPHS}.InvokeSubgraphAutogradOp.forward",
                f"{_SUBGRAPHS}.InvokeSubgraphAutogradOp.backward",
                f"{_SUBGRAPHS}.trace_joint_graph_as_bwd",
            ),
            "polycast.compilers.nested_regions:trace_again_in_regions",
        ),
        Change(
            "torch._higher_order_ops.utils",
            ("torch._higher_order_ops.utils.registered_hop_fake_fns",),
            "polycast.compilers.nested_regions:run_traced_without_autocast",
        ),
    ),
)
CACHED_CASTS = Feature(
    "cached casts",
    "Compiled code casts each weight at each call.",
    (
        Change(
            _GRAPH_CAPTURE,
            (f"{_GRAPH_CAPTURE}._create_graph",),
            "polycast.compilers.cached_casts:keep_from_callers",
        ),
        Change(
            "torch._inductor.graph",
            ("torch._inductor.graph.GraphLowering.output", "torch._inductor.lowering.lowerings"),
            "polycast.compilers.cached_casts:keep_from_inductor",
        ),
    ),
)
REGIONS_IN_GRAPHS = Feature(
    "regions in graphs",
    "Regions with policy=, recipe= or cache= break the graph of compiled functions that enter them.",
    (
        Change(
            "torch._dynamo.variables.ctx_manager",
            (
                "torch._dynamo.variables.ctx_manager.AutocastModeVariable.__init__",
                "torch._dynamo.variables.ctx_manager.AutocastModeVariable.python_type",
            ),
            "polycast.compilers.graph_regions:let_graphs_hold_overrides",
        ),
        Change(
            "torch._dynamo.output_graph",
            ("torch._dynamo.output_graph.OutputGraph.call_user_compiler",),
            "polycast.compilers.graph_regions:leave_regions_of_failed_graphs",
        ),
        Change(
            "torch.fx.passes.split_module",
            ("torch.fx.passes.split_module.split_module",),
            "polycast.compilers.graph_regions:let_graphs_with_regions_be_split",
        ),
    ),
)
GRAPHS_ON_DISK = Feature(
    "graphs on disk",
    "Each process compiles the functions that enter a region, instead of loading their code from disk.",
    (
        Change(
            "torch._functorch._aot_autograd.autograd_cache",
            ("torch._functorch._aot_autograd.autograd_cache.check_node_safe",),
            "polycast.compilers.cache_key:cache_graphs_with_regions",
        ),
    ),
)
CHECKPOINT = Feature(
    "checkpoint",
    "torch.utils.checkpoint does not recompute with the policy= and cache= of its forward. In regions with either, "
    "call checkpoint(polycast.capture().wrap(function), ...).",
    (
        Change(
            "torch.utils.checkpoint",
            (
                "torch.utils.checkpoint.CheckpointFunction._backward_cls.run_function",
                "torch.utils.checkpoint._CheckpointFrame.recompute_fn",
            ),
            "polycast.region.checkpoint:carry_in_checkpoints",
        ),
    ),
)
COMPILED_MODELS = Feature(
    "compiled models",
    "A model that is compiled while it has a rule itself may run uncompiled after the rule is removed: compile it "
    "again then.",
    (
        Change(
            "torch._dynamo",
            ("torch._dynamo.eval_frame.OptimizedModule._initialize",),
            "polycast.region.compiled_models:look_past_rules",
        ),
    ),
)
WRITES = Feature(
    "writes",
    "Cached casts may be stale after writes through DLPack, with the version set back, in dispatch modes or by "
    "CUDA graphs, and torch.utils.swap_tensors refuses weights that have cached casts.",
    (
        Change(
            "torch.autograd.grad_mode",
            ("torch.autograd.grad_mode._unsafe_preserve_version_counter.__exit__",),
            "polycast.engine.casts.unversioned_writes:note_hidden_writes",
        ),
        Change("torch.utils", ("torch.utils.weakref",), "polycast.engine.casts.unversioned_writes:forget_swapped"),
        Change(
            "torch._C",
            ("torch._C._to_dlpack", "torch._C._to_dlpack_versioned", "torch._C._autograd._get_data_attr"),
            "polycast.engine.casts.unversioned_writes:export_aliases",
        ),
        Change(
            "torch.utils._python_dispatch",
            (
                "torch.utils._python_dispatch.TorchDispatchMode.__enter__",
                "torch.utils._python_dispatch.TorchDispatchMode.__exit__",
            ),
            "polycast.engine.casts.unversioned_writes:watch_modes",
        ),
        Change(
            "torch.cuda.graphs",
            ("torch.*.*Graph.capture_begin", "torch.*.*Graph.capture_end", "torch.*.*Graph.replay"),
            "polycast.engine.casts.unversioned_writes:watch_graphs",
        ),
    ),
    outlives_uninstall=True,
)
COMPILERS_READS = Feature(
    "reads of the compiler",
    "The first call of newly compiled code drops the cached casts of the weights that it uses.",
    (
        Change(
            "torch._subclasses.meta_utils",
            ("torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor",),
            "polycast.engine.casts.unversioned_writes:keep_while_described",
        ),
        Change(
            "torch._functorch._aot_autograd.runtime_wrappers",
            ("torch.*.runtime_wrappers._AnalyzeCustomOpInputOutputMode.__torch_dispatch__",),
            "polycast.engine.casts.unversioned_writes:keep_in_first_run",
        ),
    ),
    outlives_uninstall=True,
)
ALIASES = Feature(
    "aliases",
    "Cached casts may be stale after writes through .data, an array or a storage.",
    (
        Change(
            "torch",
            (
                "torch.Tensor.data",
                "torch.Tensor.numpy",
                "torch.Tensor.untyped_storage",
                "torch.Tensor.data_ptr",
                "torch.Tensor.apply_",
                "torch.Tensor.map_",
                "torch.Tensor.map2_",
            ),
            "polycast.engine.reference.alias_hooks:hook_aliases",
        ),
    ),
    on_undo="polycast.engine.reference.alias_hooks:clear_method_lists",
    outlives_uninstall=True,
)
SETUP_CONTEXT = Feature("setup_context", "", (), on_undo="polycast.region.custom_function:restore_setup_context")

FOR_OVERRIDES = (GUARDS, CACHE_KEYS, BACKWARD, NESTED_REGIONS, CHECKPOINT)
"""The features that regions with an override or a cache need; torch's autocast state holds neither."""


def overrides_are_guarded() -> bool:
    """Return whether compiled code is guarded on overrides: whether no change was refused that this takes."""
    return not (GUARDS.is_refused() or CACHE_KEYS.is_refused())
