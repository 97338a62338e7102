"""A silo's side of a secure round: its model leaves it only under masks that cancel in the sum of all.

    agree     public keys for this round                          out: two keys
    train     everybody's keys, the global model, the probe       out: a report; boxes for the other silos
    mask      everybody's weight, the boxes of the others         out: weight × model, masked
    confirm   who answered                                        out: a signature over that list
    reveal    everybody's signature                               out: shares that open the sum, and no model

Between steps the trained model and the keys wait in the node's own state, which Flower keeps from message to
message in every runtime, and never leave it. The silo refuses weights, of all silos and again of those who
answered, under which the sum would speak for one or two of them. What everybody is to weigh, and the order to
train, are part of the masks and of the signatures: where silos hear of different weights, or train from
different models, no sum opens. Else a coordinator could have all but one learn nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from isthmus.config import load, to_mapping
from isthmus.errors import ProtocolError
from isthmus.federation.flower import Array, ConfigRecord, Context, Message, RecordDict
from isthmus.federation.messages import Arrays, pack, round_of, settings_of, unpack
from isthmus.federation.settings import LEAST, PrivateUpdates
from isthmus.private import FixedPoint, Member, Parts, joined
from isthmus.randomness import Streams

AGREE, MASK, CONFIRM, REVEAL = "agree", "mask", "confirm", "reveal"
SECURE = "secure"
PARTS = "parts"
PROBE = "probe"
SESSION = "session"
THRESHOLD = "threshold"
LARGEST_SHARE = 0.5
"""The most that one silo may weigh among the silos of a sum."""
SUBSTANTIAL = 0.25
"""What a silo must weigh, as a share of the heaviest one, to hide the others: three of a sum must."""
_STATE = "secure-round"
_MODEL = "secure-model-"
_NOISE = "secure-model-noise-"
_ORDER = "secure-model-order-"


@dataclass(frozen=True)
class Trust:
    """A silo's own identity, and those of the silos it will sum with. Without it, as in simulations, the
    coordinator is believed about who is who."""

    identity: Ed25519PrivateKey | None = None
    trusted: Mapping[str, Ed25519PublicKey] | None = None


Trusts: TypeAlias = Callable[[Context], Trust]


def anybody(context: Context) -> Trust:
    """For simulations, where nobody has an identity."""
    return Trust()


def agree(message: Message, context: Context, name: str, trust: Trust) -> Message:
    """Begin a session: whatever waits from another one is forgotten."""
    settings = settings_of(message)
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
    """The shares of this silo's secrets, sealed for every other member."""
    member = _member(context, session_of(message), trust)
    boxes = _step(context, member, "share", parts_of(message))
    context.state[_ORDER + member.session.hex()] = ConfigRecord({"digest": digest(message.content)})
    return ConfigRecord(dict(boxes))


def keep_model(
    context: Context, session: bytes, model: Arrays, privacy: PrivateUpdates | None = None
) -> None:
    """Let the trained model wait for its weight, under its session: one that comes late harms no other.

    `privacy` is the noise that is in it, whatever the coordinator says later.
    """
    context.state[_MODEL + session.hex()] = pack(model)
    noise = json.dumps(None if privacy is None else to_mapping(privacy))
    context.state[_NOISE + session.hex()] = ConfigRecord({"privacy": noise})


def noise_of(message: Message, context: Context) -> PrivateUpdates | None:
    """The noise in the model that waits to be masked."""
    name = _NOISE + str(settings_of(message)[SESSION])
    if name not in context.state:
        raise ProtocolError("no trained model waits for its weight")
    noise = json.loads(str(context.state.config_records[name]["privacy"]))
    return None if noise is None else load(PrivateUpdates, noise)


def kept_model(context: Context, session: bytes) -> Arrays:
    """The model that waits."""
    if _MODEL + session.hex() not in context.state:
        raise ProtocolError("no trained model waits for its weight")
    return unpack(context.state.array_records[_MODEL + session.hex()])


def session_of(message: Message) -> bytes:
    """The session that an order to train belongs to."""
    return bytes(message.content.config_records[SECURE][SESSION])  # type: ignore[arg-type]


def mask(message: Message, context: Context) -> Message:
    """The model times its weight, in fixed point and under its masks. It is then forgotten."""
    settings = settings_of(message)
    member = _member(context, bytes.fromhex(settings[SESSION]))
    boxes = parts_of(message)
    weights = {str(name): float(weight) for name, weight in settings["weights"].items()}
    if weights.keys() != boxes.keys() | {member.name}:
        raise ProtocolError("the weights are not those of the members")
    check_weights(weights)
    vector = weights[member.name] * flat(kept_model(context, member.session))
    rng = Streams(int(settings["seed"]))("round", round_of(message), "silo", member.name, "fixed point")
    encoded = FixedPoint(len(weights)).encode(vector, rng)
    trained = bytes(context.state.config_records[_ORDER + member.session.hex()]["digest"])  # type: ignore[arg-type]
    masked = _step(context, member, MASK, boxes, vector=encoded, terms=terms(weights, trained))
    for prefix in (_MODEL, _NOISE, _ORDER):
        del context.state[prefix + member.session.hex()]
    return _reply(message, masked)


def confirm(message: Message, context: Context, trust: Trust) -> Message:
    """A signature over who answered, if the sum over these silos still hides each of them."""
    member = _member(context, bytes.fromhex(settings_of(message)[SESSION]), trust)
    answered = parts_of(message)
    signature = member.step(CONFIRM, answered)
    weights = json.loads(member.terms)["weights"]
    check_weights({name: weights[name] for name in answered})
    _keep(context, member)
    return _reply(message, signature)


def reveal(message: Message, context: Context, trust: Trust) -> Message:
    """The shares that open the sum of those who answered; the session is then over."""
    member = _member(context, bytes.fromhex(settings_of(message)[SESSION]), trust)
    shares = member.step(REVEAL, parts_of(message))
    del context.state[_STATE]
    return _reply(message, shares)


def check_weights(weights: Mapping[str, float]) -> None:
    """Refuse weights under which a sum would tell of one silo, or to one of two about the other."""
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
    """What masks and signatures are bound to: everybody's weight, and the digest of the order to train."""
    return json.dumps({"weights": dict(sorted(weights.items())), "order": trained.hex()}).encode()


def digest(content: RecordDict) -> bytes:
    """What tells one order from another: model, settings, round, probe, and whatever else is in it."""
    return hashlib.sha256(joined(_spelled(content))).digest()


def _spelled(content: RecordDict) -> Iterator[bytes]:
    """Every value with its place, in the order of names."""
    for name, record in sorted(content.items()):
        for key, value in sorted(record.items()):
            yield from (name.encode(), key.encode(), type(value).__name__.encode())
            if isinstance(value, Array):
                yield from (f"{value.dtype} {value.shape} {value.stype}".encode(), value.data)
            else:
                yield value if isinstance(value, bytes) else repr(value).encode()


def parts_of(message: Message) -> Parts:
    """What a message has of a step of the sum, by member; anything but bytes is a ProtocolError."""
    record = message.content.config_records.get(PARTS)
    if record is None:
        raise ProtocolError("a step of the sum has no parts")
    parts = {}
    for name, part in record.items():
        if not isinstance(part, bytes):  # bytes(n) would be n zeros
            raise ProtocolError(f"the sum has a part that is of type {type(part).__name__}, expected bytes")
        parts[str(name)] = part
    return parts


def _reply(message: Message, parts: Parts) -> Message:
    return Message(RecordDict({PARTS: ConfigRecord(dict(parts))}), reply_to=message)


def flat(model: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """All parameters in one vector, in the order of their names."""
    return np.concatenate([model[name].reshape(-1).astype(np.float64) for name in sorted(model)])


def shaped(vector: NDArray[np.float64], like: Arrays) -> Arrays:
    """A vector as `flat` makes it, in a model's own arrays."""
    result, at = {}, 0
    for name in sorted(like):
        size = like[name].size
        result[name] = vector[at : at + size].reshape(like[name].shape).astype(like[name].dtype)
        at += size
    return {name: result[name] for name in like}


def _step(context: Context, member: Member, step: str, parts: Parts, **more: Any) -> Parts:
    """A step of the sum; the member waits for the next in the node's state."""
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
