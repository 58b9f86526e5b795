"""The workshop's commands: `headway train`, `sample`, `bench` and `experiment`.

Each is a module here with a function `main(arguments) -> exit status`, imported when it runs.
"""

# A line for `headway --help`. pyproject.toml names this table in the group "headway.commands".
COMMANDS = {
    "train": "train a small language model on the source code of your Python",
    "sample": "generate text with a trained model",
    "bench": "time forward and backward beside other libraries",
    "experiment": "run experiments on stable training that check their claims: scaling, qk-clip",
}
