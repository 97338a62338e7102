"""A silo's side."""

from isthmus.federation.deployment import client

app = client
