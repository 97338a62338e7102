"""A coordinator and one accomplice among the silos try to open one silo's part of a secure sum.

The accomplice tells the coordinator all that it was sent; the coordinator says to every silo what it likes:
who is there, who has answered, and what everybody weighs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context, Message, RecordDict

from easy_rows import easy
from isthmus.errors import ConfigError, ProtocolError, RoundFailed
from isthmus.federation import apps, clients, members, rounds, runtimes
from isthmus.federation.deployment import own_trust
from isthmus.federation.messages import Arrays, order, pack, unpack
from isthmus.federation.settings import Config, Model, Rounds, StrategyOptions
from isthmus.federation.silo_data import silo_name
from isthmus.partition import Dealing
from isthmus.private import shamir
from isthmus.private.secure_sum import (
    Member,
    Parts,
    Summation,
    Words,
    _stream,
    joined,
    least_threshold,
    pairwise_mask,
)
from isthmus.rankers import LocalTraining
from isthmus.tables import Fold

SESSION = b"a session"
SECRET = np.array([11, -22, 33])
VICTIM = "a"


def identities(count: int) -> dict[str, Ed25519PrivateKey]:
    return {chr(ord("a") + at): Ed25519PrivateKey.generate() for at in range(count)}


class Hostile:
    """Silos that know each other, of which the last one is the coordinator's own."""

    def __init__(
        self,
        count: int,
        threshold: int,
        *,
        keys: Mapping[str, Ed25519PrivateKey] | None = None,
        session: bytes = SESSION,
    ) -> None:
        keys = keys or identities(count)
        known = {name: key.public_key() for name, key in keys.items()}
        self.session, self.threshold, self.keys = session, threshold, keys
        self.silos = {name: Member(name, session, threshold, key, known) for name, key in keys.items()}
        self.accomplice = max(self.silos)
        self.honest = [name for name in self.silos if name != self.accomplice]
        self.seeds: list[bytes] = []
        self.mask_keys: list[bytes] = []

    def masked(self) -> dict[str, Words]:
        """Everybody follows the protocol up to here; the accomplice passes on its shares of the victim."""
        self.adverts = [silo.advertise() for silo in self.silos.values()]
        sealed = {name: silo.share(self.adverts) for name, silo in self.silos.items()}
        self.vectors = {
            name: silo.mask(
                SECRET if name == VICTIM else np.arange(3) + ord(name),
                {peer: sealed[peer][name] for peer in self.silos if peer != name},
            )
            for name, silo in self.silos.items()
        }
        seed, key = self.silos[self.accomplice]._shares[VICTIM]
        self.seeds, self.mask_keys = [seed], [key]
        return self.vectors

    def accomplice_signs(self, answered: Sequence[str]) -> bytes:
        """The accomplice signs whatever is wanted, as often as it is wanted."""
        member = self.silos[self.accomplice]
        member._survivors = tuple(sorted(answered))
        return member._signed(member._agreement())

    def tell(self, stories: Mapping[str, Sequence[str]]) -> None:
        """Tell every honest silo its story, pass on all signatures, and collect shares of the victim."""
        signatures: dict[str, bytes] = {}
        for name, answered in stories.items():
            try:
                signatures[name] = self.silos[name].confirm(answered)
            except ProtocolError:
                continue
        for name, answered in stories.items():
            try:
                signed = signatures | {self.accomplice: self.accomplice_signs(answered)}
                shares = self.silos[name].reveal(signed)
            except ProtocolError:
                continue
            self.seeds += [shares.seeds[VICTIM]] if VICTIM in shares.seeds else []
            self.mask_keys += [shares.keys[VICTIM]] if VICTIM in shares.keys else []

    @property
    def opened(self) -> Words | None:
        """The victim's own vector, if both of its secrets can be put together."""
        if min(len(self.seeds), len(self.mask_keys)) < self.threshold:
            return None
        seed = shamir.combine(self.seeds[: self.threshold])
        key = X25519PrivateKey.from_private_bytes(shamir.combine(self.mask_keys[: self.threshold]))
        vector = self.vectors[VICTIM] - _stream(seed, self.session, b"seed", len(SECRET))
        for advert in self.adverts[1:]:
            scope, pair = joined((self.session, b"")), (VICTIM, advert.name)
            vector = vector - pairwise_mask(key, advert.mask_key, pair, scope, len(SECRET))
        return vector


def test_the_theft_works_with_both_secrets() -> None:
    """So that the tests below do not pass because the attacker cannot count."""
    hostile = Hostile(3, 3)
    hostile.masked()
    victim = hostile.silos[VICTIM]
    hostile.threshold = 1
    hostile.seeds = shamir.split(victim._seed, 1, 1)
    hostile.mask_keys = shamir.split(victim._masking.private_bytes_raw(), 1, 1)
    np.testing.assert_array_equal(hostile.opened.view(np.int64), SECRET)


@pytest.mark.parametrize("count", [3, 4, 5, 7, 9])
def test_a_majority_is_no_threshold_whoever_proposes_it(count: int) -> None:
    """With n//2 + 1 and n odd, half of the silos about the seed and half about the key are enough."""
    hostile = Hostile(count, count // 2 + 1)
    if count // 2 + 1 >= least_threshold(count):
        return
    with pytest.raises(ProtocolError, match="above two thirds"):
        hostile.masked()


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_different_stories_to_different_silos_open_nothing(count: int) -> None:
    """Whichever silos hear that the victim has answered and whichever that it has not."""
    for size in range(count):
        for chosen in combinations(sorted(identities(count))[:-1], size):
            hostile = Hostile(count, least_threshold(count))
            everybody = list(hostile.masked())
            without = [name for name in everybody if name != VICTIM]
            hostile.tell({name: everybody if name in chosen else without for name in hostile.honest})
            assert hostile.opened is None
            assert not (len(hostile.seeds) > 1 and len(hostile.mask_keys) > 1), "one list at most is opened"


def test_a_silo_gives_no_share_of_its_own_key_and_does_not_sign_that_it_is_gone() -> None:
    hostile = Hostile(4, 3)
    hostile.masked()
    assert hostile.silos[VICTIM]._shares[VICTIM][1] == b"", "it does not even have one"
    with pytest.raises(ProtocolError, match="leaves out this member"):
        hostile.silos[VICTIM].confirm(["b", "c", "d"])


def test_a_silo_signs_one_list_and_signatures_over_another_do_not_count() -> None:
    hostile = Hostile(4, 3)
    everybody = list(hostile.masked())
    first = {name: hostile.silos[name].confirm(everybody) for name in hostile.honest}
    with pytest.raises(ProtocolError, match="signed another list"):
        hostile.silos["b"].confirm(["a", "b", "c"])
    assert hostile.silos["b"].confirm(everybody) == first["b"], "the same list again is the same signature"

    split = Hostile(4, 3)
    split.masked()
    signed = {"a": split.silos["a"].confirm(everybody), "b": split.silos["b"].confirm(everybody)}
    signed["c"] = split.silos["c"].confirm(["a", "b", "c"])
    with pytest.raises(ProtocolError, match="too few members have signed"):
        split.silos["a"].reveal(signed)
    signed["d"] = split.accomplice_signs(everybody)
    assert set(split.silos["a"].reveal(signed).seeds) == set(everybody)


@pytest.mark.parametrize("session", [SESSION, b"another"])
def test_signatures_of_another_session_do_not_count(session: bytes) -> None:
    """Not even under the same session's name, among the same silos, over the same list."""
    before = Hostile(4, 3, session=session)
    everybody = list(before.masked())
    old = {name: before.silos[name].confirm(everybody) for name in before.honest}
    old["d"] = before.accomplice_signs(everybody)
    now = Hostile(4, 3, keys=before.keys)
    now.masked()
    own = {VICTIM: now.silos[VICTIM].confirm(everybody), "d": now.accomplice_signs(everybody)}
    with pytest.raises(ProtocolError, match="too few members have signed"):
        now.silos[VICTIM].reveal(old | own)


def test_nobody_stands_in_a_list_twice() -> None:
    hostile = Hostile(4, 3)
    adverts = [silo.advertise() for silo in hostile.silos.values()]
    with pytest.raises(ProtocolError, match="twice"):
        hostile.silos[VICTIM].share([*adverts, adverts[1]])
    hostile.masked()
    with pytest.raises(ProtocolError, match="somebody twice"):
        hostile.silos[VICTIM].confirm(["a", "d", "d"])
    with pytest.raises(ProtocolError, match="too short or names a stranger"):
        hostile.silos[VICTIM].confirm(["a", "d", "e"])


def test_secrets_are_shared_once() -> None:
    """Two lists of members would make two sets of shares of the same secrets."""
    hostile = Hostile(4, 3)
    hostile.masked()
    fewer = [hostile.adverts[0], hostile.adverts[2], hostile.adverts[3]]
    with pytest.raises(ProtocolError, match="already"):
        hostile.silos[VICTIM].share(fewer)


def test_nothing_is_revealed_before_a_list_is_signed() -> None:
    hostile = Hostile(3, 3)
    hostile.masked()
    with pytest.raises(ProtocolError, match="too few members have signed"):
        hostile.silos[VICTIM].reveal(dict.fromkeys("abc", bytes(64)))


def test_an_honest_coordinator_still_opens_the_sum() -> None:
    hostile = Hostile(5, least_threshold(5))
    masked = hostile.masked()
    del masked["c"]
    there = sorted(masked)
    signatures = {name: hostile.silos[name].confirm(there) for name in there}
    revealed = {name: hostile.silos[name].reveal(signatures) for name in there}
    adverts = {advert.name: advert for advert in hostile.adverts}
    boxes = {name: {} for name in hostile.silos}
    summed = Summation(SESSION, 4, 3, adverts, boxes, masked, {}, revealed).total()
    expected = SECRET + sum(np.arange(3) + ord(name) for name in "bde")
    np.testing.assert_array_equal(summed.view(np.int64), expected)


# the same against the apps that silos run


class Steps:
    """Sends silos the steps of a secure round, as a coordinator would, with whatever it likes in them."""

    def __init__(self, count: int, weights: Mapping[str, float]) -> None:
        runtimes.flower.give_identity()
        keys = identities(count)
        known = {name: key.public_key() for name, key in keys.items()}
        self.trusts = {name: members.Trust(key, known) for name, key in keys.items()}
        self.contexts = {name: Context(1, at + 2, {}, RecordDict(), {}) for at, name in enumerate(keys)}
        self.weights, self.session = weights, "00ff"
        opening = {"session": self.session, "threshold": least_threshold(count)}
        adverts: dict[str, bytes] = {}
        for name, context in self.contexts.items():
            reply = members.agree(self.message("agree", opening), context, name, self.trusts[name])
            adverts |= members.parts_of(reply)
        content = RecordDict({"secure": ConfigRecord({"session": b"\x00\xff"})})
        content["parts"] = ConfigRecord(dict(adverts))
        self.boxes = {
            name: members.boxes_for_peers(Message(content, 2, "train"), context, self.trusts[name])
            for name, context in self.contexts.items()
        }
        for context in self.contexts.values():
            members.keep_model(context, b"\x00\xff", {"w": np.ones(3)})

    def message(self, step: str, settings: Mapping[str, object]) -> Message:
        return Message(order(None, dict(settings), round=1), 2, f"query.{step}")

    def mask(self, name: str, *, session: str = "00ff") -> Message:
        message = self.message("mask", {"session": session, "weights": dict(self.weights), "seed": 0})
        boxes = {peer: self.boxes[peer][name] for peer in self.boxes if peer != name}
        message.content[members.PARTS] = ConfigRecord(boxes)
        return members.mask(message, self.contexts[name])

    def confirm(self, name: str, answered: Sequence[str], *, session: str = "00ff") -> dict[str, bytes]:
        message = self.message("confirm", {"session": session})
        message.content[members.PARTS] = ConfigRecord(dict.fromkeys(answered, b""))
        return members.parts_of(members.confirm(message, self.contexts[name], self.trusts[name]))


@pytest.mark.parametrize("part", [1 << 33, 7, True, 0.5, "text", [1 << 20, 2], [b"a"]])
def test_a_part_that_is_no_bytes_is_refused_and_takes_no_memory(part: Any) -> None:
    """A number would become as many zeros."""
    runtimes.flower.give_identity()
    content = RecordDict({members.PARTS: ConfigRecord({"a": part})})
    with pytest.raises(ProtocolError, match="a part that is"):
        members.parts_of(Message(content, 2, "train"))


def test_a_message_without_parts_is_refused() -> None:
    runtimes.flower.give_identity()
    with pytest.raises(ProtocolError, match="no parts"):
        members.parts_of(Message(RecordDict(), 2, "train"))


def test_weights_of_a_half_and_a_half_and_nothing_are_refused() -> None:
    """The accomplice weighs a half: without it the sum is the victim's model."""
    steps = Steps(3, {"a": 0.5, "b": 0.5, "c": 0.0})
    with pytest.raises(ProtocolError, match="fewer than 3 silos"):
        steps.mask(VICTIM)
    Steps(3, {"a": 0.4, "b": 0.4, "c": 0.2}).mask(VICTIM)


def test_nor_do_drop_outs_leave_such_a_sum() -> None:
    steps = Steps(4, {"a": 0.35, "b": 0.3, "c": 0.35, "d": 0.0})
    for name in steps.contexts:
        steps.mask(name)
    with pytest.raises(ProtocolError, match="fewer than 3 silos"):
        steps.confirm(VICTIM, ["a", "c", "d"])
    assert steps.confirm(VICTIM, ["a", "b", "c"])["a"]


def test_weights_that_silos_do_not_share_have_no_signatures() -> None:
    steps = Steps(4, {"a": 0.25, "b": 0.25, "c": 0.25, "d": 0.25})
    steps.mask("a")
    steps.weights = {"a": 0.4, "b": 0.2, "c": 0.2, "d": 0.2}
    signatures: dict[str, bytes] = {}
    for name in "bcd":
        steps.mask(name)
    for name in "abcd":
        signatures |= steps.confirm(name, "abcd")
    message = steps.message("reveal", {"session": "00ff"})
    message.content[members.PARTS] = ConfigRecord(dict(signatures))
    with pytest.raises(ProtocolError, match="too few members have signed"):
        members.reveal(message, steps.contexts[VICTIM], steps.trusts[VICTIM])


def test_a_step_of_another_session_is_refused() -> None:
    steps = Steps(3, {"a": 0.4, "b": 0.3, "c": 0.3})
    with pytest.raises(ProtocolError, match="no part in that session"):
        steps.mask(VICTIM, session="00fe")
    steps.mask(VICTIM)
    with pytest.raises(ProtocolError, match="no part in that session"):
        steps.confirm(VICTIM, "abc", session="00fe")


def test_a_silo_that_insists_on_masks_needs_the_others_cards() -> None:
    """Else all the others may be the coordinator's invention."""
    runtimes.flower.give_identity()
    context = Context(1, 2, {"masked-only": True}, RecordDict(), {})
    message = Message(order(None, {"session": "00ff", "threshold": 3}, round=1), 2, "query.agree")
    with pytest.raises(ProtocolError, match="without the other silos' cards"):
        members.agree(message, context, VICTIM, members.Trust())
    members.agree(message, context, VICTIM, members.Trust(Ed25519PrivateKey.generate(), {}))


def test_a_real_silo_takes_part_in_no_secure_sum_without_cards() -> None:
    with pytest.raises(ConfigError, match="cards"):
        own_trust(Context(1, 2, {"silo": "north"}, RecordDict(), {}))


def small_round(monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Fold]:
    """A secure round of five simulated silos that know each other, as real ones do."""
    keys = {f"silo-{at}": Ed25519PrivateKey.generate() for at in range(5)}
    known = {name: key.public_key() for name, key in keys.items()}

    def trusts(context: Context) -> members.Trust:
        return members.Trust(keys[silo_name(context)], known)

    monkeypatch.setattr(apps, "client_app", partial(clients.client_app, trusts=trusts))
    config = Config(
        dealing=Dealing(silos=5),
        rounds=Rounds(count=1, silos=5, attempts=1),
        model=Model(hidden=(4,)),
        strategy=StrategyOptions("fedavg"),
        local=LocalTraining(batch=4),
        secure=True,
    )
    return config, Fold("small", easy("train", 40), easy("validation", 10), easy("test", 10))


def test_a_lying_coordinator_opens_no_round_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silos' own apps, told of different lists: none reveals, and no round comes about."""
    config, fold = small_round(monkeypatch)

    def two_stories(sums: Summation, step: str, name: str) -> Parts:
        handed = own_next(sums, step, name)
        answered = sorted(handed)
        return handed if step != "confirm" or name in answered[:2] else dict.fromkeys(answered[1:], b"")

    revealed: list[str] = []
    own_next, own_receive = Summation.next, Summation.receive

    def watched(sums: Summation, step: str, name: str, parts: Mapping[str, bytes]) -> None:
        own_receive(sums, step, name, parts)
        revealed.extend([name] if step == "reveal" else [])

    monkeypatch.setattr(Summation, "receive", watched)
    assert apps.train(config, fold).rounds == 1
    assert len(revealed) == 5
    monkeypatch.setattr(Summation, "next", two_stories)
    with pytest.raises(RoundFailed, match="too few members have signed"):
        apps.train(config, fold)
    assert len(revealed) == 5


def test_agreements_are_told_apart_by_every_part_of_them() -> None:
    """Session, threshold, keys, terms, who shared and who answered are all under the signature."""
    hostile = Hostile(4, 3)
    hostile.masked()
    member = hostile.silos[VICTIM]
    member._survivors = tuple(hostile.silos)
    seen = {member._agreement()}
    state = json.loads(member.to_bytes())
    for change in (
        {"session": "77"},
        {"threshold": 4},
        {"terms": "00"},
        {"survivors": ["a", "b", "c"]},
        {"peers": dict(list(state["peers"].items())[:3])},
        {"shares": dict(list(state["shares"].items())[:3])},
    ):
        seen.add(Member.resumed(json.dumps(state | change).encode())._agreement())
    assert len(seen) == 7


def test_different_orders_to_different_silos_open_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the others train from zeros and learn nothing, the sum would be the victim's model."""
    config, fold = small_round(monkeypatch)
    sums: list[Arrays] = []
    own_reports, own_mean = members.SecureSumRelay.reports, members.sum_to_mean

    def stilled(
        self: members.SecureSumRelay, attempt: members.Attempt, orders: Sequence[Message], *rest: Any
    ) -> Any:
        for message in orders[1:]:
            told = json.loads(str(message.content.config_records["config"]["settings"]))
            told["local"] = told["local"] | {"learning_rate": 1e-30, "weight_decay": 0.0}
            arrays = unpack(message.content.array_records["arrays"])
            message.content = RecordDict(dict(message.content))
            message.content["arrays"] = pack({name: np.zeros_like(array) for name, array in arrays.items()})
            message.content["config"] = ConfigRecord(
                {**message.content.config_records["config"], "settings": json.dumps(told)}
            )
        return own_reports(self, attempt, orders, *rest)

    def watched(*arguments: Any) -> Any:
        sums.append(own_mean(*arguments))
        return sums[-1]

    monkeypatch.setattr(rounds, "sum_to_mean", watched)
    assert apps.train(config, fold).rounds == 1
    assert len(sums) == 1
    monkeypatch.setattr(members.SecureSumRelay, "reports", stilled)
    with pytest.raises(RoundFailed, match="opened to an update of length"):
        apps.train(config, fold)
    opened = sums[1]
    assert min(float(np.abs(array).min()) for array in opened.values()) > 1e3, "masks and nothing else"
