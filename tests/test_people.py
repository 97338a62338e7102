"""What settings and commands say of people: a provider that cannot be meant, groups of keys."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.cli import main
from isthmus.errors import ConfigError, DataError
from isthmus.service.oidc import Provider
from isthmus.service.people import Person
from isthmus.service.security import ApiKeys
from isthmus.service.sessions import Sessions
from isthmus.service.settings import OidcSettings, read_broker
from isthmus.service.signin import check_provider

ROOT = Path(__file__).resolve().parent.parent
TOML = """
host = "0.0.0.0"
https = true
hosts = ["search.hospital.example"]
tls = {certificate = "a", key = "b", authority = "c"}
silos.north.url = "https://north.hospital.example:8101"

[oidc]
issuer = "https://sso.hospital.example/realms/main"
client_id = "isthmus"
client_secret_file = "oidc.secret"
address = "https://search.hospital.example"
groups = {doctors = ["search", "feedback"], "*" = ["search"]}
"""


def broker(folder, old="", new=""):
    file = folder / "broker.toml"
    assert old in TOML
    file.write_text(TOML.replace(old, new, 1) if old else TOML)
    return read_broker(file)


def test_a_broker_needs_no_keys_beside_a_provider(tmp_path):
    settings = broker(tmp_path)
    assert settings.keys is None
    assert settings.oidc.redirect == "https://search.hospital.example/v1/signin/callback"
    assert settings.oidc.client_secret_file == tmp_path / "oidc.secret"
    assert settings.oidc.groups["doctors"] == ("search", "feedback")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("https://sso", "http://sso", "issuer = .* must be an https:// address"),
        ("/main", "/main?x=1", "issuer = .* must be an https:// address"),
        ('"https://search', '"http://search', "address = .* must be an https:// address"),
        ('.example"\ngroups', '.example/search"\ngroups', "must have no path"),
        ('["search.hospital.example"]', "[]", None),
        ('["search.hospital.example"]', '["other.example"]', "no name of this broker: add it to hosts"),
        ('client_id = "isthmus"', 'client_id = ""', "client_id"),
        ('client_id = "isthmus"', 'client_id = "x"\nscope = "profile"', "openid"),
        ('client_id = "isthmus"', 'client_id = "x"\nminutes = 0', "minutes"),
        ('["search", "feedback"]', '["serach"]', "did you mean 'search'"),
        ('{doctors = ["search", "feedback"], "*" = ["search"]}', "{}", "gives nobody a scope"),
        ("issuer = ", "isuer = ", "did you mean 'issuer'"),
    ],
)
def test_a_provider_that_cannot_be_meant(tmp_path, old, new, problem):
    if problem is None:
        assert broker(tmp_path, old, new)
        return
    with pytest.raises(ConfigError, match=problem):
        broker(tmp_path, old, new)


BLOCKS = re.findall(r"```toml\n(\[oidc\].*?)```", (ROOT / "docs" / "people.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=[str(at) for at in range(len(BLOCKS))])
def test_what_the_documentation_shows_is_read(tmp_path, block):
    file = tmp_path / "broker.toml"
    hosts = 'hosts = ["search.hospital.example"]\nsilos.north.url = "http://127.0.0.1:1"\n'
    file.write_text(hosts + block)
    assert read_broker(file).oidc.redirect == "https://search.hospital.example/v1/signin/callback"


def test_the_client_s_secret_is_for_its_owner_only(tmp_path):
    settings = broker(tmp_path).oidc
    secret = settings.client_secret_file
    with pytest.raises(DataError):
        Provider(settings)
    secret.write_text("\n")
    secret.chmod(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        Provider(settings)
    secret.write_text("hush")
    secret.chmod(0o644)
    with pytest.raises(DataError, match="chmod 600"):
        Provider(settings)
    assert Provider(replace(settings, client_secret_file=None)).host == "sso.hospital.example"


def test_an_operator_hears_at_the_start_that_nobody_can_sign_in(caplog):
    settings = OidcSettings("http://127.0.0.1:1", "isthmus", "http://127.0.0.1:8100", {"*": ("search",)})
    asyncio.run(check_provider(Sessions(None, Provider(settings))))
    assert "127.0.0.1 does not answer: ConnectError" in caplog.text


def test_keys_have_groups(tmp_path, capsys):
    file = str(tmp_path / "keys.json")
    assert main(["keys", "api", "add", file, "bob"]) == 0
    assert main(["keys", "api", "list", file]) == 0
    assert "groups" not in capsys.readouterr().out
    assert main(["keys", "api", "add", file, "ada", "--group", "doctors", "--group", "ward 3", "--json"]) == 0
    token = json.loads(capsys.readouterr().out)["key"]
    assert ApiKeys(file).find(token).person == Person("ada", frozenset({"doctors", "ward 3"}))
    assert main(["keys", "api", "list", file, "--json"]) == 0
    assert {each["name"]: each["groups"] for each in json.loads(capsys.readouterr().out)} == {
        "bob": [],
        "ada": ["doctors", "ward 3"],
    }
    assert main(["keys", "api", "add", file, "ada", "--group", "a\nb"]) == 1
    assert "1 to 200 letters" in capsys.readouterr().err


def test_a_file_of_keys_from_before_groups_is_read(tmp_path):
    file = tmp_path / "keys.json"
    token = ApiKeys(file).add("ada", scopes=["search"])
    saved = json.loads(file.read_text())
    del saved["keys"][0]["groups"]
    file.write_text(json.dumps(saved))
    assert ApiKeys(file).find(token).person == Person("ada")
