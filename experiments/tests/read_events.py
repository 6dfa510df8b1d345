"""Prints what TensorBoard reads in a log directory, as JSON: {run: {tag: [[step, value], ...]}}.

    python3 experiments/tests/read_events.py LOGDIR

Scalars are numbers (null where not finite) and texts are strings. Hyperparameters stand under their own tag as one object.
It needs the packages that `make tools` puts into .tools/tensorboard.
"""

import json
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / ".tools" / "tensorboard"))

from google.protobuf.json_format import MessageToDict
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata as hparams_plugin

EVERYTHING = {"scalars": 0, "tensors": 0}


def plugin_tags(run: EventAccumulator, plugin: str) -> dict:
    """The tags that a plugin shows, with what it stores beside each."""
    try:
        return run.PluginTagToContent(plugin)
    except KeyError:
        return {}


def scalars(run: EventAccumulator) -> dict:
    def point(event) -> list:
        return [event.step, event.value if math.isfinite(event.value) else None]

    return {tag: [point(event) for event in run.Scalars(tag)] for tag in run.Tags()["scalars"]}


def texts(run: EventAccumulator) -> dict:
    return {
        tag: [[event.step, event.tensor_proto.string_val[0].decode()] for event in run.Tensors(tag)]
        for tag in plugin_tags(run, "text")
    }


def hyperparameters(run: EventAccumulator) -> dict:
    found = {}
    for tag, content in plugin_tags(run, "hparams").items():
        start = hparams_plugin.parse_session_start_info_plugin_data(content)
        found[tag] = [[0, {name: MessageToDict(value) for name, value in start.hparams.items()}]]
    return found


def main(logdir: str) -> None:
    runs = EventMultiplexer(size_guidance=EVERYTHING).AddRunsFromDirectory(logdir)
    runs.Reload()
    by_name = {name: runs.GetAccumulator(name) for name in runs.Runs()}
    json.dump({name: scalars(run) | texts(run) | hyperparameters(run) for name, run in by_name.items()}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
