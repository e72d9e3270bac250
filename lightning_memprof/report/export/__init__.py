"""What was recorded, in the forms of other tools: tables, flame graphs, snapshots."""
