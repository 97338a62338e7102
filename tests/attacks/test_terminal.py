"""What others write steers nobody's terminal, ends no line of a log, and stops no check."""

from __future__ import annotations

import io
import json
import logging
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from isthmus.cli import program
from isthmus.cli.broker import show
from isthmus.cli.command import print_json, say
from isthmus.errors import ServiceError
from isthmus.service import wire
from isthmus.service.logs import ACCESS, JsonLines, PlainLines

STEERING = "\x1b]8;;https://elsewhere.example\x07tides\x1b[2J\x9b31m\r\u202e\u2028\x85"
"""A link, an erased screen, a colour, and letters that overwrite or turn a line."""


def steers(text: str) -> bool:
    return any(not sign.isprintable() for sign in text.replace("\n", ""))


def record(name: str, message: str) -> logging.LogRecord:
    return logging.LogRecord(name, logging.WARNING, "", 0, "%s", (message,), None)


def test_a_strangers_path_is_one_plain_line_of_the_log():
    path = f"/{STEERING}\nisthmus 12:00:00 GET / 200 root"
    fields = {"method": "GET", "path": path, "status": 404, "caller": "", "ms": 1.0}
    for message in (record(ACCESS, json.dumps(fields)), record("isthmus.service", path)):
        line = PlainLines().format(message)
        assert not steers(line)
        assert "\n" not in line


def test_a_line_of_the_log_is_ascii_and_has_what_was_said():
    line = JsonLines().format(record("isthmus.service", f"\ud800{STEERING}\n"))
    assert line.isascii()
    assert not steers(line)
    assert "\n" not in line
    assert json.loads(line)["message"] == f"\ud800{STEERING}\n"


@pytest.mark.parametrize("lines", [JsonLines(), PlainLines()], ids=["json", "plain"])
@pytest.mark.parametrize("runner", ["asyncio", "uvicorn.error"])
def test_a_failure_that_others_log_has_none_of_its_words(lines, runner):
    try:
        raise ValueError("hush: tumour of patient 4711")
    except ValueError as error:
        found_by = logging.LogRecord(
            runner,
            logging.ERROR,
            "",
            0,
            "not retrieved: %r",
            (error,),
            (ValueError, error, error.__traceback__),
        )
    line = lines.format(found_by)
    assert "hush" not in line
    assert "ValueError at test_terminal.py:" in line
    own = logging.LogRecord("isthmus.service", logging.ERROR, "", 0, "x", (), found_by.exc_info)
    assert "4711" in lines.format(own)
    assert not steers(lines.format(own))


@pytest.mark.parametrize("scorer", ["date", "bm25"])
def test_hits_and_silos_steer_no_terminal(monkeypatch, scorer):
    evidence = wire.Evidence(retriever=STEERING, raw=1.0, probability=0.5, weight=1.0, contribution=0.0)
    hit = wire.Hit(
        document="tides",
        silo="north",
        probability=0.5,
        score=1.0,
        title=STEERING,
        snippet=STEERING,
        date=STEERING[:40],
        type=STEERING,
        explanation=[evidence],
    )
    status = wire.SiloStatus(silo="north", status="answered", detail=STEERING, scorer=scorer)
    facets = wire.Facets(matches=1, silos={STEERING: 1}, types={STEERING: 1}, years={STEERING: 1})
    suggestion = wire.Suggestion(query=STEERING, words={}, silos=[])
    answer = wire.Answer(
        hits=[hit],
        silos=[status],
        threshold=0,
        below=0,
        took_ms=1,
        facets=facets,
        suggestion=suggestion,
        understood=wire.Understood(words=STEERING, hints=[STEERING]),
    )
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    show(answer, facets=True)
    assert "tides" in out.getvalue()
    assert not steers(out.getvalue())


def test_what_a_server_says_went_wrong_steers_no_terminal(monkeypatch, capsys):
    def refused(arguments):
        raise ServiceError(f"Bad Gateway: {STEERING}")

    words = SimpleNamespace(parse_args=lambda words: SimpleNamespace(run=refused))
    monkeypatch.setattr(program, "parser", lambda verb: words)
    assert program.main(["search", "tides"]) == 1
    say(f"isthmus: {STEERING}")
    print_json({"detail": STEERING})
    out, err = capsys.readouterr()
    assert not steers(out + err)
    assert json.loads(out) == {"detail": STEERING}


@pytest.mark.parametrize("seconds", [1e300, -1e300, 253_402_300_800, -1])
@pytest.mark.parametrize("field", ["time", "certificate_ends", "revocations"])
def test_a_silos_clock_that_no_calendar_has_is_refused_before_a_check_reads_it(field, seconds):
    with pytest.raises(ValidationError):
        wire.Machine(**{field: seconds})


def test_a_large_disk_is_no_fault_of_its_silo():
    assert wire.Machine(disk_free_bytes=200 * 10**12).disk_free_bytes == 200 * 10**12
