"""The workshop's commands: `headway train`, `sample`, `bench` and `experiment`.

Each is a module here with a function `main(arguments) -> exit status`, imported when it runs.
"""

# A line for `headway --help`. pyproject.toml names this table in the group "headway.commands".
COMMANDS = {
    "train": "train a small language model on text that every Python brings",
    "sample": "let a trained model write",
    "bench": "time forward and backward against what else you could use",
    "experiment": "claims about stable training that check themselves: scaling, qk-clip",
}
