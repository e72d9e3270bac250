"""Views of a run: one view model, one module a format."""
