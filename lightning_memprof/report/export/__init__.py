"""Recordings in the formats of other tools: tables, flame graphs, snapshots."""
