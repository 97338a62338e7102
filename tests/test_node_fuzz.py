"""A node's whole API under generated requests, right and wrong: no 500, nothing beside its schema."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.service.limits import message_header
from isthmus.service.node import Node
from isthmus.service.node_api import node_app
from isthmus.service.security import ApiKeys
from isthmus.service.settings import EncoderSettings, NodeSettings, Policy, RequestLimits, SharedStatistics
from isthmus.service.stores import Draft
from silo_stand_in import Loop

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is among the test tools")


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    """A node on loopback, and a key that may do everything."""
    folder, loop = tmp_path_factory.mktemp("fuzz"), Loop()
    keys = ApiKeys(folder / "api-keys.json")
    token = keys.add("fuzz", scopes=["search", "feedback", "metrics", "admin", "audit"])
    everything = Policy(
        search=True, snippets=True, counts=True, learning=True, feedback=True, judgements=True, operate=True
    )
    told = NodeSettings(
        "north",
        folder / "north",
        keys=keys.path,
        peers={"fuzz": everything},
        encoder=EncoderSettings(dimensions=4),
        statistics=SharedStatistics("exact"),
        limits=RequestLimits(per_second=1e6, burst=1_000_000),
    )
    with Node(told) as made:
        made.put([Draft(f"d{at}", "tide", f"power of the waves {at}") for at in range(20)])
        app = node_app(made)
        app._failures.per_second = app._failures.burst = 1e6  # wrong keys come by the thousand here
        yield f"http://127.0.0.1:{loop.serve(app).port}", token
        loop.close()


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_no_generated_request_breaks_a_node(node, soak_count):
    url, token = node
    headers = {"Authorization": f"Bearer {token}"}
    schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json", headers=headers)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) == 33
    # what else than statistics may be sent as statistics, questions or models is another test's business
    binary = {("put", "/v1/statistics"), ("post", "/v1/learning/{session}/{number}"), ("put", "/v1/learning")}
    operations = [each for each in operations if (each.method, each.path) not in binary]
    modes = schemathesis.GenerationMode
    for operation in operations:
        varied = bool(operation.body) or bool(operation.query) or bool(operation.path_parameters)
        kinds = (modes.POSITIVE, modes.NEGATIVE) if varied else (modes.POSITIVE,)
        ways = [operation.as_strategy(generation_mode=mode) for mode in kinds]
        each = soak_count(12, 800) if varied else 2

        @settings(max_examples=each, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=st.one_of(ways))
        def holds(case):
            sent = headers | message_header()
            response = case.call(base_url=url, headers=sent)
            if response.status_code == 431:  # heads beyond the limit: tests/attacks/test_front.py
                return
            late = response.status_code == 504  # ten milliseconds may pass before a busy machine begins
            excluded = [schemathesis.checks.not_a_server_error] if late else []
            case.validate_response(response, excluded_checks=excluded, headers=sent)

        holds()
