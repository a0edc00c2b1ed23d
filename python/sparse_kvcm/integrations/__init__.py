"""Clients of the manager: one module or package per framework, each importing it only when used."""
