"""Time of the training steps: phases, events, throughput and machine load."""
