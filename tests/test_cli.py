"""The command line as such: what is printed where, exit statuses, examples, start-up."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from isthmus import __version__
from isthmus.cli import commands, main, parser
from isthmus.cli.command import Command, print_json
from isthmus.cli.doctor import PURPOSES
from isthmus.errors import DataError

COMMANDS = commands()
NAMES = [command.name for command in COMMANDS]


def isthmus(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The program as its own process."""
    command = [sys.executable, "-m", "isthmus", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


def standing_in(monkeypatch: pytest.MonkeyPatch, run) -> None:
    """Make `isthmus act` the only command."""
    act = Command("act", "act", "isthmus act", lambda parser: None, run)
    monkeypatch.setattr("isthmus.cli.program.commands", lambda verb=None: (act,))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"isthmus {__version__}\n"


@pytest.mark.parametrize("arguments", [(), ("fedrisk", "--data", "mq2008"), ("--help",)])
def test_a_command_of_another_distribution_says_how_to_get_it(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    assert main(["reproduce", *arguments]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "pip install ./reproduce" in said


def test_a_distribution_that_cannot_be_imported_brings_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def load(self) -> object:
            raise ModuleNotFoundError("isthmus_reproduce")

    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: (Broken(),))
    assert [command.name for command in commands()] == NAMES


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_help_has_an_example_that_parses(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    _check_help(command, (), capsys)


def _check_help(command: Command, above: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    path = (*above, command.name)
    with pytest.raises(SystemExit) as stop:
        main([*path, "--help"])
    assert stop.value.code == 0
    told = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    assert all(" ".join(line.split()) in told for line in command.example.splitlines())
    for example in command.example.replace("\n", " && ").split(" && "):
        program, *arguments = shlex.split(example)
        assert program == "isthmus"
        assert tuple(arguments[: len(path)]) == path
        assert parser().parse_args(arguments).run in _runs(command)
    for verb in command.verbs:
        _check_help(verb, path, capsys)


def _runs(command: Command) -> list[object]:
    return [run for verb in command.verbs for run in _runs(verb)] if command.verbs else [command.run]


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_every_command_has_json(command: Command) -> None:
    own = argparse.ArgumentParser()
    command.fill(own)
    for verb in _verbs(own):
        assert "--json" in verb._option_string_actions


def _verbs(own: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """What can be run, however deep its verb lies."""
    below = [
        verb
        for action in own._actions
        if isinstance(action, argparse._SubParsersAction)
        for verb in action.choices.values()
    ]
    return [verb for each in below for verb in _verbs(each)] if below else [own]


@pytest.mark.parametrize("command", COMMANDS, ids=NAMES)
def test_every_argument_is_explained(command: Command) -> None:
    own = argparse.ArgumentParser()
    command.fill(own)
    assert not [action.dest for action in own._actions if not action.help]


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        ("fuse a.run -m rrf b.run -o c.run", ["a.run", "b.run"]),
        ("evaluate x.qrels a.run --baseline a.run b.run", ["a.run", "b.run"]),
        ("evaluate -m nDCG@10 P@1 -- x.qrels a.run", ["a.run"]),
        ("fuse -m rrf -o c.run -- -a.run b.run", ["-a.run", "b.run"]),
    ],
)
def test_options_may_stand_between_files(line: str, runs: list[str]) -> None:
    assert parser().parse_args(line.split()).runs == runs


def test_files_that_an_option_has_taken_are_told_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["evaluate", "-m", "nDCG@10", "x.qrels", "a.run"])
    assert "(if -m took them, put them before it, or -- between)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["evaluate", "x.qrels"])  # where no option is there that could have
    assert capsys.readouterr().err.endswith("required: RUN\n")


def test_a_value_that_is_wrong_is_told_without_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fuse", "a.run", "--top", "-3"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "isthmus fuse: error: argument --top: expected a whole number from 1, got '-3'"


@pytest.mark.parametrize("command", ["calibrate a.run", "fuse a.run b.run"])
def test_a_precision_is_checked_before_anything_is_computed(command: str, capsys) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--qrels", "x.qrels", "-o", "c.run", "--precision", "1.5"])
    assert "expected a number from 0 to 1, got '1.5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "retrieve pydocs test -o {}",
        "retrieve pydocs test -o a.run --qrels {}",
        "calibrate a.run --qrels x.qrels -o {}",
        "fuse a.run b.run --qrels x.qrels --save {}",
        "rank run1 synthetic -o {}",
        "features corpus queries.tsv x.qrels -o {}",
        "sketch publish south north -o {}",
        "evaluate x.qrels a.run --per-query {}",
    ],
)
def test_a_file_that_has_no_folder_is_refused_before_any_work(line: str, tmp_path: Path, capsys) -> None:
    for place, told in (("none/x.csv", "there is no folder"), (".", "is a folder")):
        with pytest.raises(SystemExit) as stop:
            main(line.format(tmp_path / place).split())
        assert stop.value.code == 2
        assert told in capsys.readouterr().err


def test_the_demonstration_needs_its_folder_before_it_works(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--headless", "--out", str(tmp_path / "file")]) == 1
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"isthmus: {tmp_path / 'file'} is a file (expected a folder)\n")


def test_a_query_may_be_several_words() -> None:
    assert parser().parse_args(["search", "tidal", "power", "-k", "3"]).query == ["tidal", "power"]


@pytest.mark.parametrize("arguments", [["evalute"], ["doctor", "--jsn"], ["documents", "--jsn"]])
def test_wrong_usage_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "usage: isthmus" in said.err


DASHED = "(for a query with -word, put -- before it, or quote the whole query)"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("serch x", "there is no 'serch'; did you mean search?"),
        ("--versoin", "there is no --versoin; did you mean --version?"),
        ("keys --hlep", "there is no --hlep; did you mean --help?"),
        ("--json serch", "there is no 'serch'; did you mean search?"),
        ("documents opn", "there is no 'opn'; did you mean open?"),
        ("zzz", "there is no 'zzz'; isthmus --help lists what there is"),
        ("doctor --jsn", "there is no --jsn; did you mean --json?"),
        ("retrieve pydocs test --otu=x.run", "there is no --otu; did you mean --out?"),
        ("documents list --cnofig x.toml", "there is no --cnofig; did you mean --config?"),
        ("evaluate a.qrels b.run --zzz", "there is no --zzz; isthmus evaluate --help lists what there is"),
        ("evaluate a.qrels b.run --format markdwn", "there is no 'markdwn'; did you mean markdown?"),
        ("evaluate a.qrels b.run --format x", "there is no 'x'; one of text, markdown, latex, html"),
        ("rank model data more -o x.run", "unexpected: more"),
        ("search matrix -norm", f"unexpected: -norm {DASHED}"),
        ("search -norm", f"the following arguments are required: QUERY {DASHED}"),
        ("search -kernel", f"argument -k: expected a whole number from 1, got 'ernel' {DASHED}"),
        ("search tide -k 0", "argument -k: expected a whole number from 1, got '0'"),
        *(
            (
                f"{line} --port {port}",
                f"argument --port: expected a whole number from {low} to 65535, got '{port}'",
            )
            for line, low in (
                ("demo", 1),
                ("new x", 1),
                ("attach qdrant://x", 1),
                ("calibrate-endpoint x", 0),
            )
            for port in (65_536, 99_999)
        ),
    ],
)
def test_what_is_mistyped_is_told_the_nearest(line, told, capsys) -> None:
    with pytest.raises(SystemExit):
        main(line.split())
    assert capsys.readouterr().err.endswith(f"{told}\n")


def test_what_went_wrong_is_one_line_and_folded_to_a_terminal(capsys, monkeypatch) -> None:
    missing = ["evaluate", "judgements that nobody has " * 5, "a.run", "-m", "MAP"]
    assert main(missing) == 1
    (line,) = capsys.readouterr().err.splitlines()
    monkeypatch.setenv("COLUMNS", "80")
    assert main(missing) == 1
    with pytest.raises(SystemExit):
        main(["retrieve", "pydocs", "test", "--nothing-like-any-option-there-is"])
    folded = capsys.readouterr().err
    assert line.split() == folded.partition("usage:")[0].split()
    assert max(map(len, folded.splitlines())) <= 80 < len(line)


@pytest.mark.parametrize("words", [(), ("documents",), ("keys", "api")])
def test_without_a_command_there_is_help(words, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*words])
    assert stop.value.code == 0
    alone = capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    assert capsys.readouterr() == alone
    assert alone.err == ""


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("--json doctor", "doctor --json"),
        ("--config x.toml --json documents list", "documents list --config x.toml --json"),
        ("documents --config x.toml list", "documents list --config x.toml"),
        ("-m nDCG@10 evaluate a.qrels b.run", "evaluate a.qrels b.run -m nDCG@10"),
        ("-k 3 search -- --tide", "search -k 3 -- --tide"),
    ],
)
def test_options_may_stand_before_the_command(line: str, same: str) -> None:
    assert parser().parse_args(line.split()) == parser().parse_args(same.split())


def _helps(own: argparse.ArgumentParser):
    yield own.format_help()
    for action in own._actions:
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _helps(verb)


def test_every_help_fits_the_terminal_and_has_an_example(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    top, *helps = _helps(parser())
    assert len(helps) > 60
    for text in (top, *helps):
        assert max(map(len, text.splitlines())) <= 80, text
    for text in helps:
        assert "example:" in text, text


def test_examples_go_on_after_a_backslash_and_are_the_same_words(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    long = "isthmus act one/long/file two/long/file 'P@5(rel=2) and more' --baseline some/long/file"
    top = argparse.ArgumentParser()
    Command("act", "act", long).add_to(top.add_subparsers())
    (text,) = list(_helps(top))[1:]
    example = text.partition("example:")[2]
    assert max(map(len, text.splitlines())) <= 60
    assert shlex.split(example.replace("\\\n", "")) == shlex.split(long)


def test_documents_requests_and_receipts_fit_the_terminal(tmp_path, monkeypatch, capsys) -> None:
    from isthmus.service import Draft, Node, read_node
    from isthmus.service.stores import StoredRequest

    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "silo.toml").write_text('silo = "north"\nfolder = "."\n[encoder]\nkind = "none"\n')
    id = "/".join(["folder of minutes"] * 8) + "/minutes.md"
    long, number = "why people ask " * 12, "0123456789abcdef" * 2
    with Node(read_node(tmp_path / "silo.toml")).offline() as node:
        node.store.put([Draft(id, "The minutes of the meeting " * 9, "text " * 20), Draft("b", "B", "text")])
        node.store.ask(StoredRequest(number, id, "broker", "p" * 12, "Ada Lovelace " * 9, long, long, 1.0))
        node.index.catch_up()
    config = ("--config", str(tmp_path / "silo.toml"))
    for command in (("list",), ("requests",), ("remove", id)):
        assert main(["documents", *command, *config]) == 0
        out = capsys.readouterr().out
        assert max(map(len, out.splitlines())) <= 80, out
        if command[0] == "requests":
            assert number in out, "whole, to be copied"
        else:
            assert id.replace(" ", "") in "".join(out.split()) or command[0] == "list"
    assert main(["documents", "remove", "nobody", *config]) == 1
    told = capsys.readouterr().err
    assert max(map(len, told.splitlines())) <= 80
    assert "no document nobody" in told
    assert "isthmus documents list" in " ".join(told.split())


def test_what_classify_prints_fits_the_terminal(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    labels = ["complaints about deliveries that came too late", "questions about invoices and reminders"]
    rows = [
        f'"{label.split()[at % 3]} {label.split()[-1]} {at}","{label}"'
        for at in range(12)
        for label in labels
    ]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]))
    assert main(["classify", "fit", str(tmp_path / "rows.csv"), "-o", str(tmp_path / "model")]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_foreseen_failure_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(asked: argparse.Namespace) -> None:
        raise DataError("score is not\na number", file="a.run", line=7, text="x", cure="write a number")

    standing_in(monkeypatch, run)
    assert main(["act"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "isthmus: a.run:7: score is not a number: 'x' (write a number)\n"


def test_a_file_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    standing_in(monkeypatch, lambda asked: (tmp_path / "none" / "x").write_text(""))
    assert main(["act"]) == 1
    assert capsys.readouterr().err == f"isthmus: {tmp_path / 'none' / 'x'}: No such file or directory\n"


def test_a_fault_of_ours_is_told_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(asked: argparse.Namespace) -> None:
        raise ZeroDivisionError

    standing_in(monkeypatch, run)
    with pytest.raises(ZeroDivisionError):
        main(["act"])


def test_interrupted_is_130() -> None:
    script = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
import isthmus.cli.program as cli
from isthmus.cli.command import Command
def act(asked):
    print("working", flush=True)
    time.sleep(30)
cli.commands = lambda verb=None: (Command("act", "act", "isthmus act", lambda parser: None, act),)
sys.exit(cli.main(["act"]))
"""
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "working\n"
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=120)
    assert child.returncode == 130
    assert said == "isthmus: interrupted\n"


def test_who_stops_waiting_is_told_that_the_broker_goes_on_learning(monkeypatch, capsys) -> None:
    from isthmus.service import Client

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "learn_to_end", interrupted)
    assert main(["learn", "--broker", "http://127.0.0.1:9"]) == 130
    told = capsys.readouterr().err
    assert "the broker goes on learning" in told
    assert "isthmus learn --broker http://127.0.0.1:9 --list" in told


def test_a_port_without_room_for_the_silos_is_one_line(tmp_path: Path, capsys) -> None:
    assert main(["new", str(tmp_path / "new"), "--port", "65535"]) == 1
    assert "port 65535 leaves none for 2 silos after the broker's" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_closed_pipe_is_quiet() -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "isthmus", "doctor", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    child.stdout.close()
    assert child.stderr is not None
    said = child.stderr.read()
    child.stderr.close()
    assert child.wait(timeout=240) == 141
    assert said == ""


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json([{"a": float("nan"), "b": (1.5, float("inf"))}])
    assert json.loads(capsys.readouterr().out) == [{"a": None, "b": [1.5, None]}]


def test_help_starts_at_once() -> None:
    script = "import sys; from isthmus.cli import parser; parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"numpy", "pyarrow", "scipy", "sklearn", "flwr", "matplotlib", "rich", "asyncio"}


def test_help_is_fast() -> None:
    """Processor time, which on an idle machine is the time one waits."""

    def seconds() -> tuple[float, float]:
        before, began = os.times(), time.perf_counter()
        assert isthmus("--help").returncode == 0
        after, ended = os.times(), time.perf_counter()
        worked = after.children_user - before.children_user + after.children_system - before.children_system
        return worked, ended - began

    best, waited = min(seconds() for _ in range(5))
    print(f"isthmus --help: {best:.2f} s of work, {waited:.2f} s by the clock")
    assert best < 0.3


def test_choices_are_those_of_the_library() -> None:
    """The command line spells them out, so that `--help` need not load NumPy."""
    from isthmus.cli import data
    from isthmus.evaluation import PROFILES
    from isthmus.report import FORMS
    from isthmus.tables import SPLITS

    assert tuple(PROFILES) == data.PROFILES
    assert tuple(FORMS) == data.FORMATS
    assert ("all", *SPLITS) == data.OWN_QUERIES


def test_doctor_tells_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    packages = {package["name"]: package for package in found["packages"]}
    assert {"numpy", "fastapi", "pyarrow"} <= packages.keys()
    assert all(package["ok"] for package in packages.values())
    assert not {"flwr", "matplotlib"} & packages.keys()
    assert {extra["name"] for extra in found["extras"]} >= {"train", "plots", "ray", "dense", "trees"}
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert PURPOSES.keys() == project["project"]["optional-dependencies"].keys()
    assert found["cores"] >= 1
    assert "pydocs" in found["data"]["found"]
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"isthmus {__version__}, Python ")
    assert "train, for training across silos (Flower): " in told


def test_queries_that_are_not_there_are_told_the_nearest(tmp_path, capsys) -> None:
    for queries, cure in (("tets", "did you mean 'test'?"), ("x.tsv", "give a file, or one of all, train,")):
        assert main(["retrieve", "pydocs", queries, "-o", str(tmp_path / "x.run")]) == 1
        assert f"isthmus: no queries and no file {queries!r} ({cure}" in capsys.readouterr().err


def test_the_start_names_every_extra() -> None:
    start = (Path(__file__).parents[1] / "docs" / "start.md").read_text(encoding="utf-8")
    assert [extra for extra in PURPOSES if f"`{extra}`" not in start] == []


@pytest.mark.parametrize(
    ("encoder", "line", "advice"),
    [
        ("", "north: encoder its own latent space (LSA)", 'name = "bge-small" in every silo'),
        ('kind = "none"', "north: encoder none: BM25 alone", "isthmus encoder add bge-small: beside BM25"),
        (
            'kind = "encoder"\nname = "bge-small"',
            "north: encoder bge-small",
            "not here: isthmus encoder add bge",
        ),
        ('kind = "encoder"\nname = "http://127.0.0.1:1/v1#m"', "north: encoder http://127.0.0.1:1/v1#m", ""),
        ('kind = "encoder"\npath = "gone"', "gone", "the node does not start without it"),
    ],
)
def test_doctor_tells_a_nodes_encoder(encoder, line, advice, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("ISTHMUS_ENCODERS", str(tmp_path / "none"))
    config = tmp_path / "north.toml"
    config.write_text(f'silo = "north"\nfolder = "north"\n[encoder]\n{encoder}\n')
    assert main(["doctor", "--config", str(config)]) == 0
    report = capsys.readouterr().out
    assert line in report
    assert advice in report
    assert main(["doctor", "--json", "--config", str(config)]) == 0
    assert bool(json.loads(capsys.readouterr().out)["node"]["advice"]) is bool(advice)


def test_doctor_names_the_cure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from importlib import metadata

    known = metadata.version

    def version(name: str) -> str:
        if name in ("ray", "httptools"):
            raise metadata.PackageNotFoundError(name)
        return "1.26.0" if name == "numpy" else known(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setenv("ISTHMUS_ENCODERS", "nowhere")
    assert main(["doctor"]) == 1
    said = capsys.readouterr()
    shown = " ".join(said.out.split())  # folded to the terminal
    assert "missing ray: pip install 'isthmus[ray]'" in shown
    assert "isthmus encoder add bge-small: beside BM25" in shown
    assert "numpy>=2.1, found 1.26.0" in shown
    assert "needs attention: httptools, numpy" in said.err
