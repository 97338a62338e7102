"""Secure rounds: a silo's model leaves it only under masks that cancel in the sum over all silos.

    step      in                                                  out
    agree     the session and its threshold                       two public keys
    train     all members' keys, the global model, the probe      a report; boxes for the other silos
    mask      all members' weights, boxes from the others         weight × model, masked
    confirm   the names of the silos that answered                a signature over that list
    reveal    all signatures                                      shares that open the sum, and no model

On the silo's side, the trained model and the keys are stored between steps in the node's own state, which
Flower keeps from message to message in every runtime; they never leave it. The silo refuses weights under
which the sum would reveal the models of one or two silos. It checks the weights of all silos at `mask`, and
those of the silos that answered at `confirm`. All weights and the order to train are bound into the masks and
signatures: if silos receive different weights, or train from different models, no sum opens. Otherwise a
coordinator could have all silos but one learn nothing.

The coordinator's side passes keys and boxes on, weighs silos by their reports, and opens one sum.

Silos may drop out at every step as long as `threshold` of them are left. Otherwise the attempt has failed,
before anything could be opened, and is safe to repeat with other silos. A sum that has been opened and is not
credible ends the round: it cannot be determined which silo spoiled it, and another sum over almost the same
models could be compared with it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from isthmus.asking import Answers, Silos, TooFew
from isthmus.config import load, to_mapping
from isthmus.errors import PrivacyError, ProtocolError, RoundFailed
from isthmus.federation import messages
from isthmus.federation.flower import Array, ConfigRecord, Context, Grid, Message, MessageType, RecordDict
from isthmus.federation.settings import LEAST, PrivateUpdates, Rounds
from isthmus.private import FixedPoint, Member, Parts, Summation, joined, least_threshold
from isthmus.randomness import Streams

AGREE, MASK, CONFIRM, REVEAL = "agree", "mask", "confirm", "reveal"
SECURE = "secure"
PARTS = "parts"
PROBE = "probe"
SESSION = "session"
THRESHOLD = "threshold"
LARGEST_SHARE = 0.5
"""Largest share of a sum's total weight that one silo may have."""
SUBSTANTIAL = 0.25
"""Least weight with which a silo helps to hide the others, as a share of the heaviest; three must have it."""
_STATE = "secure-round"
_MODEL = "secure-model-"
_NOISE = "secure-model-noise-"
_ORDER = "secure-model-order-"


@dataclass(frozen=True)
class Trust:
    """A silo's own identity, and the public keys of the silos that it will sum with. Without them, as in
    simulations, the coordinator is trusted to say which key belongs to which silo."""

    identity: Ed25519PrivateKey | None = None
    trusted: Mapping[str, Ed25519PublicKey] | None = None


Trusts: TypeAlias = Callable[[Context], Trust]


def anybody(context: Context) -> Trust:
    """Return a `Trust` without identities, for simulations."""
    return Trust()


def agree(message: Message, context: Context, name: str, trust: Trust) -> Message:
    """Begin a session and return this silo's public keys for it; models of other sessions are deleted."""
    settings = messages.settings_of(message)
    threshold = int(settings[THRESHOLD])
    if threshold < LEAST:
        raise ProtocolError(f"a sum of fewer than {LEAST} models hides none of them")
    if trust.trusted is None and context.node_config.get("masked-only", False):
        raise ProtocolError(
            "this silo's models leave it under masks only, and without the other silos' cards a coordinator"
            " could invent them (isthmus keys new and trust, then the folder in the node's configuration)"
        )
    member = Member(name, bytes.fromhex(settings[SESSION]), threshold, trust.identity, trust.trusted)
    for left in [key for key in context.state if key.startswith(_MODEL)]:
        del context.state[left]
    return _reply(message, _step(context, member, AGREE, {}))


def boxes_for_peers(message: Message, context: Context, trust: Trust) -> ConfigRecord:
    """Return the shares of this silo's secrets, one sealed box for every other member."""
    member = _member(context, session_of(message), trust)
    boxes = _step(context, member, "share", parts_of(message))
    context.state[_ORDER + member.session.hex()] = ConfigRecord({"digest": digest(message.content)})
    return ConfigRecord(dict(boxes))


def keep_model(
    context: Context, session: bytes, model: messages.Arrays, privacy: PrivateUpdates | None = None
) -> None:
    """Store the trained model under its session until its weight arrives; late ones affect no other session.

    `privacy` is the noise that the model contains, whatever the coordinator says later.
    """
    context.state[_MODEL + session.hex()] = messages.pack(model)
    noise = json.dumps(None if privacy is None else to_mapping(privacy))
    context.state[_NOISE + session.hex()] = ConfigRecord({"privacy": noise})


def noise_of(message: Message, context: Context) -> PrivateUpdates | None:
    """Return the noise in the stored model that is to be masked; ProtocolError if there is no model."""
    name = _NOISE + str(messages.settings_of(message)[SESSION])
    if name not in context.state:
        raise ProtocolError("no trained model waits for its weight")
    noise = json.loads(str(context.state.config_records[name]["privacy"]))
    return None if noise is None else load(PrivateUpdates, noise)


def kept_model(context: Context, session: bytes) -> messages.Arrays:
    """Return the trained model stored for this session; ProtocolError if there is none."""
    if _MODEL + session.hex() not in context.state:
        raise ProtocolError("no trained model waits for its weight")
    return messages.unpack(context.state.array_records[_MODEL + session.hex()])


def session_of(message: Message) -> bytes:
    """The session that an order to train belongs to."""
    return bytes(message.content.config_records[SECURE][SESSION])  # type: ignore[arg-type]


def mask(message: Message, context: Context) -> Message:
    """Return the stored model times its weight, in fixed point and masked, and delete the model."""
    settings = messages.settings_of(message)
    member = _member(context, bytes.fromhex(settings[SESSION]))
    boxes = parts_of(message)
    weights = {str(name): float(weight) for name, weight in settings["weights"].items()}
    if weights.keys() != boxes.keys() | {member.name}:
        raise ProtocolError("the weights are not those of the members")
    check_weights(weights)
    vector = weights[member.name] * flat(kept_model(context, member.session))
    rng = Streams(int(settings["seed"]))(
        "round", messages.round_of(message), "silo", member.name, "fixed point"
    )
    encoded = FixedPoint(len(weights)).encode(vector, rng)
    trained = bytes(context.state.config_records[_ORDER + member.session.hex()]["digest"])  # type: ignore[arg-type]
    masked = _step(context, member, MASK, boxes, vector=encoded, terms=terms(weights, trained))
    for prefix in (_MODEL, _NOISE, _ORDER):
        del context.state[prefix + member.session.hex()]
    return _reply(message, masked)


def confirm(message: Message, context: Context, trust: Trust) -> Message:
    """Sign the list of silos that answered, if the sum over them still hides each of them."""
    member = _member(context, bytes.fromhex(messages.settings_of(message)[SESSION]), trust)
    answered = parts_of(message)
    signature = member.step(CONFIRM, answered)
    weights = json.loads(member.terms)["weights"]
    check_weights({name: weights[name] for name in answered})
    _keep(context, member)
    return _reply(message, signature)


def reveal(message: Message, context: Context, trust: Trust) -> Message:
    """Return the shares that open the sum over the silos that answered, and end the session."""
    member = _member(context, bytes.fromhex(messages.settings_of(message)[SESSION]), trust)
    shares = member.step(REVEAL, parts_of(message))
    del context.state[_STATE]
    return _reply(message, shares)


def check_weights(weights: Mapping[str, float]) -> None:
    """Raise ProtocolError for weights under which a sum would reveal one silo's model, or reveal one of two
    silos' models to the other."""
    if not all(math.isfinite(weight) and 0 <= weight <= 1 for weight in weights.values()):
        raise ProtocolError("the weights are not those of a mean")
    heaviest = max(weights.values(), default=0.0)
    if heaviest > (LARGEST_SHARE + 1e-9) * math.fsum(weights.values()):
        raise ProtocolError(f"a silo's weight is more than {LARGEST_SHARE:g} of the sum")
    if not is_hiding(weights):
        raise ProtocolError(
            f"fewer than {LEAST} silos of the sum weigh {SUBSTANTIAL:g} of what the heaviest does"
        )


def is_hiding(weights: Mapping[str, float]) -> bool:
    """Whether at least three silos weigh enough to hide each other."""
    heaviest = max(weights.values(), default=0.0)
    substantial = [weight for weight in weights.values() if weight >= (SUBSTANTIAL - 1e-9) * heaviest > 0]
    return len(substantial) >= LEAST


def terms(weights: Mapping[str, float], trained: bytes) -> bytes:
    """Encode what masks and signatures are bound to: all weights, and the digest of the order to train."""
    return json.dumps({"weights": dict(sorted(weights.items())), "order": trained.hex()}).encode()


def digest(content: RecordDict) -> bytes:
    """Return the SHA-256 digest of an order's whole content: model, settings, round, probe and all else."""
    return hashlib.sha256(joined(_spelled(content))).digest()


def _spelled(content: RecordDict) -> Iterator[bytes]:
    """Yield record name, key, type and value of every entry, in the order of names."""
    for name, record in sorted(content.items()):
        for key, value in sorted(record.items()):
            yield from (name.encode(), key.encode(), type(value).__name__.encode())
            if isinstance(value, Array):
                yield from (f"{value.dtype} {value.shape} {value.stype}".encode(), value.data)
            else:
                yield value if isinstance(value, bytes) else repr(value).encode()


def parts_of(message: Message) -> Parts:
    """Return a message's parts for a step of the sum, by member; ProtocolError unless all are bytes."""
    record = message.content.config_records.get(PARTS)
    if record is None:
        raise ProtocolError("a step of the sum has no parts")
    parts = {}
    for name, part in record.items():
        if not isinstance(part, bytes):  # bytes(n) of an integer would be n zeros
            raise ProtocolError(f"the sum has a part that is of type {type(part).__name__}, expected bytes")
        parts[str(name)] = part
    return parts


def _reply(message: Message, parts: Parts) -> Message:
    return Message(RecordDict({PARTS: ConfigRecord(dict(parts))}), reply_to=message)


def flat(model: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Concatenate all parameters into one vector, in the order of their names."""
    return np.concatenate([model[name].reshape(-1).astype(np.float64) for name in sorted(model)])


def shaped(vector: NDArray[np.float64], like: messages.Arrays) -> messages.Arrays:
    """Split a vector made by `flat` into arrays with the names, shapes and types of `like`."""
    result, at = {}, 0
    for name in sorted(like):
        size = like[name].size
        result[name] = vector[at : at + size].reshape(like[name].shape).astype(like[name].dtype)
        at += size
    return {name: result[name] for name in like}


def _step(context: Context, member: Member, step: str, parts: Parts, **more: Any) -> Parts:
    """Perform a step of the sum, and store the member in the node's state for the next step."""
    result = member.step(step, parts, **more)
    _keep(context, member)
    return result


def _keep(context: Context, member: Member) -> None:
    context.state[_STATE] = ConfigRecord({"member": member.to_bytes()})


def _member(context: Context, session: bytes, trust: Trust | None = None) -> Member:
    if _STATE in context.state:
        state = bytes(context.state.config_records[_STATE]["member"])  # type: ignore[arg-type]
        known = trust or Trust()
        member = Member.resumed(state, identity=known.identity, trusted=known.trusted)
        if member.session == session:
            return member
    raise ProtocolError("this silo takes no part in that session")


SUM = "the sum"
"""Name to which a failure is attributed if no silo can be named."""
IN_SUM = " (its model is in the sum)"


@dataclass
class Attempt:
    """One session of a secure sum: its members by node, and the reasons why some have been excluded."""

    number: int
    silos: Mapping[int, str]
    sums: Summation
    trained: bytes = b""
    """Digest of the order to train."""
    rejected: dict[str, str] = field(default_factory=dict)


class SecureSumRelay:
    """Runs secure sums over a grid: `begin`, `agree`, `reports`, and `total` with all silos' weights."""

    def __init__(
        self,
        grid: Grid,
        rounds: Rounds,
        *,
        settings: Mapping[str, Any],
        entropy: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.grid, self.rounds, self.settings = grid, rounds, settings
        self._entropy = entropy
        self.threshold, self.cure = LEAST, ""
        self.identified = False
        """Whether silos have signed their keys and can identify each other; simulated ones cannot."""

    def begin(self, number: int, silos: Mapping[int, str], model: messages.Arrays) -> Attempt:
        """Start a session of these silos (names by node) for models of the same size as `model`."""
        self.threshold = max(LEAST, self.rounds.minimum, least_threshold(len(silos)))
        self.cure = _cure(len(silos), self.threshold)
        size = sum(array.size for array in model.values())
        return Attempt(number, silos, Summation(self._entropy(16), self.threshold, size))

    def agree(self, attempt: Attempt) -> None:
        """Step 1: collect the public keys of all silos that answer."""
        self._step(attempt, AGREE, attempt.silos.values(), {THRESHOLD: self.threshold})
        self.identified = all(advert.signature for advert in attempt.sums.adverts.values())

    def reports(
        self, attempt: Attempt, orders: Sequence[Message], limits: messages.ReplyLimits
    ) -> messages.Checked:
        """Step 2: send the orders to train; collect the reports, and the silos' boxes for each other."""
        sums = attempt.sums
        sent = list[Message]()
        for each in orders:
            if attempt.silos[each.metadata.dst_node_id] not in sums.adverts:
                continue
            session = ConfigRecord({SESSION: sums.session})
            parts = ConfigRecord(dict(sums.next("share", "")))
            content = RecordDict({**each.content, SECURE: session, PARTS: parts})
            attempt.trained = digest(content)  # the same for all silos
            sent.append(Message(content, each.metadata.dst_node_id, each.metadata.message_type))
        replies = messages.ask(self.grid, sent, rounds=self.rounds, enough=self.threshold)
        there = {node: name for node, name in attempt.silos.items() if name in sums.adverts}

        def complete(name: str, reply: Message) -> None:
            sums.receive("share", name, parts_of(reply))

        shows = "how many examples it trained on, its loss and the errors that it reports, not its model"
        deadline = self.rounds.deadline
        checked = messages.check(replies, there, limits, deadline=deadline, shows=shows, complete=complete)
        attempt.rejected.update(checked.rejected)
        if len(checked.usable) < self.threshold:
            raise TooFew(f"{len(checked.usable)} silos were left of the {self.threshold} that the sum needs")
        return checked

    def total(self, attempt: Attempt, weights: Mapping[str, float]) -> tuple[np.ndarray[Any, Any], set[str]]:
        """Steps 3 to 5: return the sum over silos that sent a masked model, and the names of the others."""
        sums = attempt.sums
        weights = {name: weights[name] for name in sorted(sums.boxes)}
        self._step(attempt, MASK, weights, {"weights": weights, **self.settings})
        if not is_hiding({name: weights[name] for name in sums.masked}):
            # give up now: silos would refuse to sign such a sum
            raise TooFew(f"too few of the {len(sums.masked)} silos left weigh enough to hide each other")
        self._step(attempt, CONFIRM, sorted(sums.masked), late=IN_SUM)
        self._step(attempt, REVEAL, sorted(sums.signatures), late=IN_SUM)
        try:
            words = sums.total(terms(weights, attempt.trained))
        except PrivacyError as error:
            raise RoundFailed(attempt.number, {SUM: str(error)}, self.threshold) from error
        return FixedPoint(len(weights)).decode(words), sums.boxes.keys() - sums.masked.keys()

    def _step(
        self,
        attempt: Attempt,
        step: str,
        silos: Iterable[str],
        settings: Mapping[str, Any] = MappingProxyType({}),
        *,
        late: str = "",
    ) -> None:
        """Carry out one step of the sum; `late` is appended to the reason recorded for silos lost in it."""
        config = {SESSION: attempt.sums.session.hex(), **settings}

        def written(parts: Parts) -> RecordDict:
            content = messages.order(None, config, round=attempt.number)
            content[PARTS] = ConfigRecord(dict(parts))
            return content

        nodes = {name: node for node, name in attempt.silos.items()}
        carrier = messages.GridCarrier(self.grid, f"{MessageType.QUERY}.{step}", nodes, self.rounds)
        asker = Silos(tuple(nodes), carrier, self.rounds.deadline, self.threshold)
        answers: Answers[None] = Answers({})
        try:
            answers = asker.pass_on(attempt.sums, step, silos, written, parts_of)
        except TooFew as few:
            answers = few.answers
            raise
        finally:
            lost = answers.reasons().items()
            attempt.rejected |= {name: f"{why} at the step {step!r}{late}" for name, why in lost}

    def check_credible(
        self, attempt: Attempt, mean: messages.Arrays, model: messages.Arrays, limits: messages.ReplyLimits
    ) -> None:
        """Raise RoundFailed for a mean that moved implausibly far: single updates cannot be inspected."""
        moved = messages.update_length(mean, model)
        whole = messages.update_length(model, {name: np.zeros_like(array) for name, array in model.items()})
        if not moved <= limits.norm * max(1.0, whole, limits.noise):
            blamed = f"opened to an update of length {moved:.3g}, and whose it was cannot be told"
            raise RoundFailed(attempt.number, {SUM: blamed}, self.threshold)


def even(weights: Mapping[str, float], silos: Iterable[str]) -> dict[str, float]:
    """Adjust the silos' weights: three are substantial, none exceeds half of their sum, which stays the same.

    The second and third are raised to `SUBSTANTIAL` times the heaviest, and all are scaled down to pay for
    it. The excess of a silo above half of the sum is then distributed among the others in proportion.
    """
    own = {name: weights[name] for name in silos}
    whole = math.fsum(own.values())
    first, *others = sorted(own, key=lambda name: (-own[name], name))
    lifted = own | {name: max(own[name], SUBSTANTIAL * own[first]) for name in others[: LEAST - 1]}
    if lifted != own:
        share = whole / math.fsum(lifted.values())
        own = {name: weight * share for name, weight in lifted.items()}
    if own[first] <= LARGEST_SHARE * whole:
        return own
    share = (1 - LARGEST_SHARE) * whole / (whole - own[first])
    return {name: own[name] * share for name in own} | {first: LARGEST_SHARE * whole}


def _cure(silos: int, threshold: int) -> str:
    spare = max(0, silos - threshold)
    return (
        f"a secure sum of {silos} silos needs {threshold} of them to its end, so {spare or 'none'} may drop"
        " out: ask more silos a round (rounds.silos)"
    )


def sum_to_mean(
    summed: np.ndarray[Any, Any],
    weights: Mapping[str, float],
    own: Mapping[str, messages.Arrays],
    model: messages.Arrays,
) -> messages.Arrays:
    """Return the mean of the silos' sum and the server's own candidates, over the sum of `weights`."""
    whole = summed + sum(weights[name] * flat(arrays) for name, arrays in own.items())
    return shaped(whole / math.fsum(weights.values()), model)
