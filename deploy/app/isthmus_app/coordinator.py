"""The coordinator's side."""

from isthmus.federation.deployment import server

app = server
