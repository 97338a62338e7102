"""The whole API under generated requests, right and wrong: no 500, nothing that the schema does not say."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isthmus.service.api import broker_app
from isthmus.service.broker import Broker
from isthmus.service.security import ApiKeys
from isthmus.service.settings import BrokerSettings, RequestLimits, SiloAddress
from silo_stand_in import Loop, StandIn

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is among the test tools")


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker of two silos on loopback, and a key that may do everything."""
    folder, loop = tmp_path_factory.mktemp("fuzz"), Loop()
    ports = {name: loop.serve(StandIn(name)).port for name in ("east", "west")}
    keys = ApiKeys(folder / "api-keys.json")
    token = keys.add("fuzz", scopes=["search", "feedback", "metrics", "admin"])
    told = BrokerSettings(
        folder=folder,
        keys=keys.path,
        silos={name: SiloAddress(f"http://127.0.0.1:{port}") for name, port in ports.items()},
        share_statistics=False,
        limits=RequestLimits(per_second=1e6, burst=1_000_000),
    )

    async def made():
        return Broker(told)

    app = broker_app(loop.run(made()))
    app._failures.per_second = 1e6  # wrong keys come by the thousand here
    app._failures.burst = 1e6
    url = f"http://127.0.0.1:{loop.serve(app, lifespan='on').port}"
    yield url, token
    loop.close()


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_no_generated_request_breaks_the_api(broker, soak_count):
    url, token = broker
    schema = schemathesis.openapi.from_url(f"{url}/v1/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    asked = [operation for operation in operations if operation.body]
    assert len(operations) > len(asked) == 11  # the others have no body
    cases, wanted = [0], soak_count(60, 5000)
    modes = schemathesis.GenerationMode
    for operation in operations:
        kinds = (modes.POSITIVE, modes.NEGATIVE) if operation in asked else (modes.POSITIVE,)
        ways = [operation.as_strategy(generation_mode=mode) for mode in kinds]
        each = wanted // len(asked) + 1

        @settings(max_examples=each, deadline=None, suppress_health_check=list(HealthCheck))
        @given(case=st.one_of(ways))
        def holds(case):
            cases[0] += 1
            sent = {"Authorization": f"Bearer {token}"}
            response = case.call(base_url=url, headers=sent)
            if response.status_code != 431:  # heads beyond the limit: tests/attacks/test_front.py
                case.validate_response(response, headers=sent)

        holds()
    assert cases[0] >= wanted
