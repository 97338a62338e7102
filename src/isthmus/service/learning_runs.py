"""Learning runs of a broker: one at a time, started by a person, by the schedule or by the command line.

    runs = LearningRuns(broker)
    await runs.once("masked", by="ada")      to its end: a version on disk, in use, handed to the silos
    runs.begin("masked", by="ada")           in the background; `view` says how far it is

The result of every run is stored as a version with its record, or with the reason why the run failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from isthmus.errors import DataError, IsthmusError
from isthmus.learning import SearchModel
from isthmus.service import wire
from isthmus.service.broker import Broker
from isthmus.service.joint_learning import JointLearning
from isthmus.service.limits import HttpProblem
from isthmus.service.scale import baseline_of
from isthmus.service.versions import NONE

if TYPE_CHECKING:
    from isthmus.learning import Record

SCHEDULE = "schedule"
"""Recorded as the starter of scheduled runs."""
LOOK_EVERY = 60.0
"""Seconds between two checks whether a run is due."""
ALONE = (
    "fewer than three silos with enough judged queries took part: each calibrated the baseline by its own "
    'judgements, which stay there (together: three silos, or consent = "two" under [learning] of both)'
)

_log = logging.getLogger("isthmus.service")


class LearningRuns:
    """The learning runs of one broker, and its versions."""

    def __init__(self, broker: Broker) -> None:
        self.broker, self.versions = broker, broker.models.versions
        self._task: asyncio.Task[None] | None = None
        self._schedule: asyncio.Task[None] | None = None
        self._mode: wire.Mode = "masked"
        self._stage, self._done, self._started = "", 0, 0.0

    def start(self) -> None:
        """Follow the schedule, if there is one."""
        if self.broker.settings.learning.seconds:
            self._schedule = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Cancel the schedule and the run."""
        for task in (self._schedule, self._task):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task

    @property
    def is_running(self) -> bool:
        """Whether a run is under way in this process."""
        return self._task is not None and not self._task.done()

    def begin(self, mode: wire.Mode, *, by: str) -> None:
        """Begin a run in the background; raises a 409 while one is under way."""
        if self.is_running:
            raise HttpProblem(409, "the silos are learning already: wait until that has ended")
        self._task = asyncio.create_task(self._logged(mode, by))

    async def _logged(self, mode: wire.Mode, by: str) -> None:
        try:
            version = await self.once(mode, by=by)
            _log.info("learned %s: %s", version.version, (version.record or {}).get("why", version.problem))
        except IsthmusError as error:
            _log.warning("learning came to nothing: %s", error)
        except Exception:
            _log.exception("learning failed")

    async def once(
        self, mode: wire.Mode, *, by: str, tell: Callable[[str], None] = lambda stage: None
    ) -> wire.LearnedVersion:
        """Learn, store the version, use it and hand it to the silos. Returns the version.

        Raises Refused while another process has a run. A failure is stored, and raised.
        """

        def report(stage: str) -> None:
            self._stage, self._done = stage, self._done + 1
            tell(stage)

        with self.versions.learning():
            self._mode, self._started, self._done = mode, time.time(), 0
            version = wire.LearnedVersion(
                version=self.versions.new(), learned=wire.moment(self._started), mode=mode, by=by
            )
            try:
                learned, left_out = await self._learned(mode, report)
            except Exception as error:  # a fit to answers of silos may raise anything
                known = isinstance(error, IsthmusError)
                problem = str(error) if known else f"learning failed ({type(error).__name__}): see the log"
                self._keep_failure(version.model_copy(update={"problem": problem}))
                raise
            if learned is None:
                version = version.model_copy(update={"problem": ALONE, "record": {"left_out": left_out}})
                self._keep_failure(version)
                return version
            return await self._adopt(version, *learned, left_out, report)

    async def _learned(
        self, mode: wire.Mode, report: Callable[[str], None]
    ) -> tuple[tuple[SearchModel, Record] | None, dict[str, str]]:
        broker = self.broker
        report("statistics of all silos")
        if broker.settings.share_statistics:
            await broker.exchange.once()
            await broker.scale.once()
        run = JointLearning(list(broker.silos.values()), mode, baseline_of(broker.scale.scale), report)
        learned = await run.learn()
        if learned is not None:
            SearchModel.from_bytes(learned[0].to_bytes())  # raises if silos could not read it
        return learned, run.left_out

    async def _adopt(
        self,
        version: wire.LearnedVersion,
        model: SearchModel,
        record: Record,
        left_out: dict[str, str],
        report: Callable[[str], None],
    ) -> wire.LearnedVersion:
        content = replace(model, about={**model.about, "version": version.version}).to_bytes()
        table = {**json.loads(record.to_json()), "left_out": left_out}
        version = version.model_copy(update={"record": table, "usable": True, "current": True})
        self.versions.add(version, content)
        self.versions.use(version.version)
        report("handing the model to the silos")
        await self.broker.models.once()
        return version

    def _keep_failure(self, version: wire.LearnedVersion) -> None:
        """Store a failed run. It replaces the run before it if that failed in the same way."""
        before = next(iter(self.versions.history()), None)
        self.versions.add(version, None)
        if before is not None and not before.usable and before.problem == version.problem:
            self.versions.remove(before.version)

    async def rollback(self, version: str) -> wire.LearningView:
        """Search with another version, or for "" with the one before the current one. Raises a 404 if there
        is none, a 409 during a run."""
        if self.is_running:
            raise HttpProblem(409, "the silos are learning: wait until that has ended")
        try:
            await self.use(version)
        except DataError as error:
            raise HttpProblem(404, str(error.args[0])) from None
        return self.view()

    async def use(self, version: str) -> str:
        """Do as `rollback`, and return the version that is used now."""
        if not version and self.versions.current in ("", NONE):
            raise DataError("no learned version is in use", cure="isthmus learn --list says which there are")
        wanted = version or self.versions.before()
        self.versions.use(wanted)
        await self.broker.models.once()
        _log.info("searches use the model %s", wanted)
        return wanted

    def view(self) -> wire.LearningView:
        """Return the state of learning, and all versions."""
        history, schedule = self.versions.history(), self.broker.settings.learning
        latest = history[0] if history else None
        due = self._due()
        return wire.LearningView(
            state="running" if self.is_running else "idle",
            stage=self._stage if self.is_running else "",
            done=self._done if self.is_running else 0,
            started=wire.moment(self._started) if self.is_running else None,
            mode=self._mode,
            problem="" if latest is None else latest.problem,
            judged=None if latest is None else (latest.record or {}).get("queries"),
            every=schedule.every,
            next=None if due is None else wire.moment(due),
            current=self.versions.current,
            versions=history,
            silos=dict(self.broker.models.by_silo),
        )

    def _due(self) -> float | None:
        """Return when the schedule's next run is due; None without a schedule."""
        seconds = self.broker.settings.learning.seconds
        if not seconds:
            return None
        latest = self.versions.latest()
        return time.time() if latest is None else latest + seconds

    async def _follow(self) -> None:
        while True:
            due = self._due()
            if due is not None and due <= time.time() and not self.is_running:
                self.begin(self.broker.settings.learning.mode, by=SCHEDULE)
            await asyncio.sleep(LOOK_EVERY)
