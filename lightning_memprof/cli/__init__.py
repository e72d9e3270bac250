"""The command line: one self-contained module per command; :mod:`lightning_memprof.cli.main` lists them."""
