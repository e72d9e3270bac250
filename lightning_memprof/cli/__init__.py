"""The command ``lightning-memprof``: one small file a sub-command, loaded when it is asked for."""
