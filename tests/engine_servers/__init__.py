"""Servers of search engines for tests: fetched by package name, pinned by hash, on loopback, ended by pid."""

from engine_servers.switch import Switch as Switch
