"""Extensions: what packages add to a device that another package serves: discovery, policies, broken packages."""

import pytest

LIBRARY = """
@torch.library.custom_op("acme::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    return x.clone()
"""
ASKS = """
def availability(self):
    return polycast.plugin.Availability(polycast.is_autocast_available("cpu"))
AcmeExtension.availability = availability
"""


def policies(**by_op):
    """Return source that gives the extension policies."""
    table = ", ".join(f"'acme::{op}': polycast.CastPolicy.{policy}" for op, policy in by_op.items())
    return f"AcmeExtension.policies = {{{table}}}\n"


def test_an_extension_is_imported_when_its_device_is_first_used(run, extension):
    extension("acme-one", "cpu")
    extension("acme-two", "xpu")
    answer = run("""
        names = ("acme_one", "acme_two")
        answer = []
        for use in ("polycast.backends()", "polycast.plugin.get_backend('cuda')", "polycast.plugin.get_backend('cpu')"):
            eval(use)
            answer.append([name for name in names if name in sys.modules])
    """)
    assert answer == [[], [], ["acme_one"]]


def test_the_status_of_a_device_names_its_extensions_of_which_two_may_give_an_op_one_policy(run, extension):
    extension("acme-two", entry="cpu.two", amendment=policies(attend="FP32"))
    extension("acme-one", amendment=policies(attend="FP32"))
    answer = run("answer = polycast.backends()['cpu']")
    assert answer["state"] == "ready"
    assert answer["extensions"][:2] == ["acme-one 1.0 (acme_one)", "acme-two 1.0 (acme_two)"]


@pytest.mark.parametrize("defined", ["with the extension", "later"])
def test_an_op_of_a_library_has_the_policy_of_an_extension(run, extension, engine, defined):
    is_later = defined == "later"
    extension("acme-ops", amendment=LIBRARY * (not is_later) + policies(attend="LOWER_PRECISION_FP"))
    answer = run(
        f"""
        with polycast.autocast("cpu"):
            pass
        if {is_later}:
            exec({LIBRARY!r}, globals())
        with polycast.autocast("cpu"):
            inside = torch.ops.acme.attend(torch.ones(2)).dtype
            found = polycast.plugin.explain_op("acme::attend", "cpu")
        answer = [inside, torch.ops.acme.attend(torch.ones(2)).dtype, found.policy.name, found.rule, found.rule_name]
        """,
        POLYCAST_ENGINE=engine,
    )
    assert answer == ["torch.bfloat16", "torch.float32", "LOWER_PRECISION_FP", "extension", "acme-ops"]


def test_a_policy_that_an_op_of_a_later_library_cannot_have_is_left_out_with_a_warning(run, extension, engine):
    extension("acme-ops", amendment=policies(write_="FP32"))
    answer = run(
        """
        polycast.install("cpu")
        library = torch.library.Library("acme", "DEF")
        library.define("write_(Tensor(a!) x) -> ()")
        def enter():
            with polycast.autocast("cpu"):
                pass
        answer = [text for _, text, _ in caught(enter, times=2)]
        """,
        POLYCAST_ENGINE=engine,
    )
    (text,) = (each for each in answer if "slow" not in each)
    assert text.startswith("A policy is left out that acme-ops adds to 'cpu': 'acme::write_' has no tensors but those")


def test_an_op_of_the_backends_table_is_not_changed(run, extension):
    table = "{'aten::mm': polycast.CastPolicy.FP32, 'aten::add.Tensor': polycast.CastPolicy.FP32}"
    extension("acme-ops", amendment=f"AcmeExtension.policies = {table}")
    answer = run("""
        x = torch.ones(2, 2, dtype=torch.bfloat16)
        with polycast.autocast("cpu"):
            answer = [torch.mm(x, x).dtype, torch.add(x, x).dtype, polycast.plugin.explain_op("mm", "cpu").rule]
    """)
    assert answer == ["torch.bfloat16", "torch.float32", "backend's table"]


@pytest.mark.parametrize(("rule", "expected"), [("register_op", "register_op"), ("region", "region's policy")])
def test_policies_of_regions_and_register_op_go_before_an_extensions(run, extension, rule, expected):
    extension("acme-ops", amendment=LIBRARY + policies(attend="LOWER_PRECISION_FP"))
    answer = run(f"""
        polycast.install("cpu")
        if {rule!r} == "register_op":
            polycast.register_op("acme::attend", "fp32")
        policy = {{"acme::attend": "fp32"}} if {rule!r} == "region" else None
        with polycast.autocast("cpu", policy=policy):
            dtype = torch.ops.acme.attend(torch.ones(2, dtype=torch.bfloat16)).dtype
            answer = [dtype, polycast.plugin.explain_op("acme::attend", "cpu").rule]
    """)
    assert answer == ["torch.float32", expected]


def test_two_packages_with_different_policies_for_an_op_are_a_conflict_with_both_names(run, extension):
    extension("acme-one", amendment=policies(attend="FP32"))
    extension("acme-two", amendment=policies(attend="LOWER_PRECISION_FP"))
    answer = run("""
        available = [polycast.is_autocast_available("cpu"), polycast.plugin.get_backend("xpu").device_type]
        status = polycast.backends()["cpu"]
        answer = [error_of(polycast.autocast, "cpu"), error_of(polycast.install, "cpu"), available, status]
    """)
    conflict = (
        "Two packages give 'acme::attend' different policies on 'cpu': acme-one 1.0 (acme_one) gives FP32, and "
        "acme-two 1.0 (acme_two) LOWER_PRECISION_FP. Uninstall one of them."
    )
    assert answer[:3] == [["BackendConflictError", conflict]] * 2 + [[False, "xpu"]]
    assert (answer[3]["state"], answer[3]["reason"]) == ("conflict", conflict)


@pytest.mark.parametrize(
    ("amendment", "said"),
    [
        ("raise ImportError('no driver')", "is broken: ImportError: no driver"),
        ("raise SystemExit(3)", "is broken: SystemExit: 3"),
        ("polycast.plugin.get_backend('cpu')", "is broken: BackendBrokenError: The device 'cpu' was requested while"),
        ("AcmeExtension.device_type = 'xpu'", "device_type is 'xpu', but the entry point is named 'cpu'"),
        ("AcmeExtension.policies = {'mm': 1}", "policies: 'mm' is not an op name"),
        ("AcmeExtension = polycast.plugin.Backend", "expected an instance of polycast.plugin.Extension, got Backend"),
        ("AcmeExtension = lambda: 5", "expected an instance of polycast.plugin.Extension, got int: 5"),
        ("AcmeExtension = lambda: None", "acme_bad must implement the hook polycast_extension"),
        ("AcmeExtension.ops_in_cpp = 'acme'", "ops_in_cpp must be a list or tuple of the names of packages"),
    ],
)
def test_a_broken_extension_breaks_itself_only_and_is_named(run, extension, amendment, said):
    extension("acme-bad", amendment=amendment)
    extension("acme-good", amendment=LIBRARY + policies(attend="LOWER_PRECISION_FP"))
    ((_, warned, _),), status, dtype = run("""
        answer = [caught(lambda: polycast.install("cpu"), times=2), polycast.backends()["cpu"]]
        with polycast.autocast("cpu"):
            answer.append(torch.ops.acme.attend(torch.ones(2)).dtype)
    """)
    assert warned.startswith("An extension of 'cpu' is left out: acme-bad 1.0 (acme_bad) is broken: ")
    assert warned.endswith("\nRepair or uninstall acme-bad.")
    assert said in warned
    assert (status["state"], dtype) == ("ready", "torch.bfloat16")
    assert said in status["extensions"][0]


@pytest.mark.parametrize(
    "amendment",
    ["warnings.warn('old')", "AcmeExtension.availability = lambda self: warnings.warn('old')"],
    ids=["imported", "asked"],
)
def test_an_extension_that_warns_is_left_out_where_warnings_are_errors_and_the_device_is_used(
    run, extension, engine, amendment
):
    extension("acme-old", amendment="import warnings\n" + amendment)
    kind, text, dtype = run(
        """
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", polycast.errors.SlowDtypeWarning)
        answer = error_of(polycast.autocast, "cpu")
        for _ in range(2):
            with polycast.autocast("cpu"):
                dtype = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
        answer.append(dtype)
        """,
        POLYCAST_ENGINE=engine,
    )
    assert (kind, dtype) == ("UserWarning", "torch.bfloat16")
    assert text.startswith("An extension of 'cpu' is left out: acme-old 1.0 (acme_old) is broken: UserWarning: old\n")


def test_an_extension_may_ask_for_its_device_whether_it_can_be_used(run, extension):
    extension("acme-ops", amendment=LIBRARY + policies(attend="LOWER_PRECISION_FP") + ASKS)
    answer = run("""
        with polycast.autocast("cpu"):
            dtype = torch.ops.acme.attend(torch.ones(2)).dtype
        answer = [dtype, polycast.backends()["cpu"].extensions[0]]
    """)
    assert answer == ["torch.bfloat16", "acme-ops 1.0 (acme_ops)"]


def test_a_conflict_with_an_extension_that_asks_for_its_device_is_an_error_at_each_use(run, extension):
    extension("acme-one", amendment=ASKS + policies(attend="FP32"))
    extension("acme-two", amendment=policies(attend="LOWER_PRECISION_FP"))
    answer = run("answer = [error_of(polycast.autocast, 'cpu')[0] for _ in range(2)]")
    assert answer == ["BackendConflictError"] * 2


def test_an_extension_that_cannot_be_used_now_is_left_out_and_the_status_says_why(run, extension):
    amendment = LIBRARY + policies(attend="LOWER_PRECISION_FP")
    amendment += "AcmeExtension.availability = lambda self: polycast.plugin.Availability(False, 'no licence')\n"
    extension("acme-ops", amendment=amendment)
    answer = run("""
        with polycast.autocast("cpu"):
            dtype = torch.ops.acme.attend(torch.ones(2)).dtype
        from polycast.registry.registry import registry
        modules = [type(each).__module__ for each in registry.extensions("cpu")]
        answer = [dtype, "acme_ops" in modules, polycast.backends()["cpu"].extensions[0]]
    """)
    assert answer == ["torch.float32", False, "acme-ops 1.0 (acme_ops) cannot be used: no licence"]


def test_extensions_of_third_parties_are_ignored_without_discovery(run, extension):
    extension("acme-ops")
    answer = run("polycast.install('cpu'); answer = 'acme_ops' in sys.modules", POLYCAST_DISCOVERY="0")
    assert answer is False


@pytest.mark.parametrize("when", ["imported", "asked"])
def test_a_fork_waits_until_another_thread_has_loaded_an_extension(run, extension, when):
    slow = "import sys\nsys.begun.set()\nsys.forks.wait(60)\n"
    asked = "def availability(self):\n    import acme_needs\n    return polycast.plugin.Availability(True)\n"
    amendment = slow if when == "imported" else asked + "AcmeExtension.availability = availability\n"
    extension("acme-slow", amendment=amendment, files={"acme_needs.py": slow + "number = 5\n"})
    answer = run("""
        import os, threading
        from polycast.registry.registry import registry
        sys.begun, sys.forks = threading.Event(), threading.Event()
        thread = threading.Thread(target=polycast.plugin.get_backend, args=("cpu",))
        thread.start()
        assert sys.begun.wait(60)
        os.register_at_fork(before=sys.forks.set)  # before polycast's
        child = os.fork()
        if child == 0:
            import acme_needs
            os._exit(not isinstance(registry.extensions("cpu")[0], sys.modules["acme_slow"].AcmeExtension))
        thread.join()
        answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    """)
    assert answer == 0
