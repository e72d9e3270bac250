"""Printers: each writes a document in one format."""
