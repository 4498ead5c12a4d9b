"""The local launcher behind `polyreme run`: N ranks of one script on this machine.

Reading order: `config` (what can be asked for), `env` (what a rank finds in its environment),
`supervisor` (when which rank gets which signal, pure), `process` and `streams` (one rank),
`launcher` (the event loop that ties them together), `report` (what is said at the end).

Only the standard library is used, and only one thread.
"""
