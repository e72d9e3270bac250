"""Time of a trace: devices, idle time, operators, collectives, threads and modules, and the report of them."""
