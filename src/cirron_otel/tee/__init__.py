"""What a program gives to its experiment tracker, copied into marks: ``profile(tee=[...])``.

One file per library says which of its functions are wrapped; nothing is, unless it is named. The
wrapped calls are guarded too: an outage of the tracker does not end the training.
"""
