"""The file of a RunLog: what is in it after an interruption, a full disk, or a checkpoint."""

import json

import pytest
import torch

import polycast
from polycast_plugins.observe import StepRecord
from polycast_plugins.observe.steps import line_of

pytestmark = pytest.mark.usefixtures("engine")


def losses(log, *values):
    for value in values:
        with log.step() as step:
            step.log(loss=value)


def recorded(history):
    return [(record.step, record.loss) for record in history.steps]


def test_a_file_can_be_read_and_resumed_wherever_the_process_was_killed(path):
    losses(polycast.RunLog(path), 1.0, 2.0)
    whole = path.read_bytes()
    first = len(whole.splitlines(keepends=True)[0])
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = recorded(polycast.RunHistory.load(path))
        assert kept == [(0, 1.0), (1, 2.0)][: (size >= first - 1) + (size >= len(whole) - 1)]
        log = polycast.RunLog(path, resume=True)
        losses(log, 3.0)
        assert recorded(log.history) == recorded(polycast.RunHistory.load(path)) == [*kept, (len(kept), 3.0)]


@pytest.mark.parametrize("text", ["{", "}", '"}', "\\\\", "{}"])
def test_braces_in_a_text_do_not_hide_where_a_step_was_cut_off(path, text):
    whole = line_of(StepRecord(0, computed_by={"command": text}))
    for size in range(len(whole) - 1):
        path.write_text(whole[:size])
        assert recorded(polycast.RunHistory.load(path)) == []
    path.write_text(whole.replace('"step": 0', '"step": -1').rstrip())
    with pytest.raises(ValueError, match="step must be an int of at least 0"):
        polycast.RunHistory.load(path)


def test_a_file_of_another_run_is_refused_and_one_for_the_writer(path):
    losses(polycast.RunLog(path), 1.0)
    with pytest.raises(FileExistsError, match=r"run\.jsonl has the steps of a run\. To continue it, pass resume=True"):
        losses(polycast.RunLog(path), 1.0)
    with pytest.raises(ValueError, match=r"path and writer are the same file, .*run\.jsonl: name another"):
        polycast.RunLog(path, writer=str(path))


def test_zeros_at_the_end_which_a_power_failure_leaves_are_dropped(path):
    losses(polycast.RunLog(path), 1.0)
    with path.open("ab") as file:
        file.write(b"\0" * 100)
    assert recorded(polycast.RunHistory.load(path)) == [(0, 1.0)]
    losses(polycast.RunLog(path, resume=True), 2.0)
    assert recorded(polycast.RunHistory.load(path)) == [(0, 1.0), (1, 2.0)]


def test_a_full_disk_does_not_stop_the_run_and_steps_are_written_when_there_is_room(path):
    resource = pytest.importorskip("resource")
    log = polycast.RunLog(path)
    losses(log, 1.0)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.warns(UserWarning, match=r"run\.jsonl cannot be written: .*\. The run goes on; its steps are kept"):
            losses(log, 2.0)
        losses(log, 3.0)  # without another warning
        assert path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert recorded(log.history) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    losses(log, 4.0)
    assert recorded(polycast.RunHistory.load(path)) == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]


def test_a_file_that_cannot_be_written_is_an_error_before_the_first_step(path):
    log = polycast.RunLog(path)
    path.parent.rmdir()
    ran = False
    with pytest.raises(OSError, match=r"run\.jsonl"), log.step():
        ran = True
    assert not ran


def test_a_first_step_that_records_nothing_leaves_a_file_for_the_next_run(path):
    with pytest.raises(KeyboardInterrupt), polycast.RunLog(path).step():
        raise KeyboardInterrupt
    losses(polycast.RunLog(path), 1.0)
    assert recorded(polycast.RunHistory.load(path)) == [(0, 1.0)]


def test_steps_after_a_checkpoint_are_those_of_the_resumed_run(path):
    log = polycast.RunLog(path)
    losses(log, 1.0)
    state = json.loads(json.dumps(log.state_dict()))
    losses(log, 2.0, 3.0, 4.0)
    in_memory = polycast.RunLog()
    losses(in_memory, 1.0, 2.0, 3.0)
    for resumed in (polycast.RunLog(path), in_memory):
        resumed.load_state_dict(state)
        losses(resumed, 5.0)
        assert recorded(resumed.history) == recorded(polycast.RunHistory.load(path)) == [(0, 1.0), (1, 5.0)]


class Broken:
    """A writer that cannot write."""

    def __init__(self):
        self.scalars = []

    def add_scalar(self, *scalar):
        self.scalars.append(scalar)
        raise ConnectionError("no route to host")


def test_a_writer_that_fails_stops_the_run_but_the_step_is_in_the_file(path):
    writer = Broken()
    log = polycast.RunLog(path, writer=writer)
    for value in (1.0, 2.0):
        with pytest.raises(ConnectionError):
            losses(log, value)
    assert recorded(log.history) == [(0, 1.0), (1, 2.0)]
    assert writer.scalars == [("polycast/loss", 1.0, 0), ("polycast/loss", 2.0, 1)]


def test_a_writer_that_fails_does_not_hide_what_interrupted_the_step(path):
    log = polycast.RunLog(path, writer=Broken())

    def interrupted():
        with log.step() as step:
            step.log(loss=1.0)
            raise KeyboardInterrupt

    said = "the step that was interrupted was not recorded: ConnectionError: no route"
    with pytest.warns(UserWarning, match=said), pytest.raises(KeyboardInterrupt):
        interrupted()
    assert recorded(log.history) == [(0, 1.0)]


def test_other_ranks_write_files_of_their_own(path, monkeypatch):
    losses(polycast.RunLog(path), 1.0)
    monkeypatch.setenv("RANK", "3")
    log = polycast.RunLog(path)
    losses(log, 2.0)
    assert log.path == path.with_name("run.rank3.jsonl")
    assert recorded(polycast.RunHistory.load(log.path)) == [(0, 2.0)]
    monkeypatch.setenv("RANK", "0")
    assert polycast.RunLog(path).path == path


def test_a_step_in_a_step_is_refused():
    log = polycast.RunLog()
    with log.step() as step:
        step.log(loss=1.0)
        with pytest.raises(RuntimeError, match="step 0 of this log has not ended: record a step at a time"):
            losses(log, 1.0)
    losses(log, 2.0)
    assert recorded(log.history) == [(0, 1.0), (1, 2.0)]


def test_numbers_that_are_no_floats_are_losses():
    numpy = pytest.importorskip("numpy")
    log = polycast.RunLog()
    losses(log, numpy.float32(0.5), numpy.int64(2), torch.tensor([3], dtype=torch.int32), torch.tensor(4.0).bfloat16())
    assert [record.loss for record in log.history.steps] == [0.5, 2.0, 3.0, 4.0]
