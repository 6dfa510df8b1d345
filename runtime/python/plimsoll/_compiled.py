"""Graphs that `torch.compile` made read tensors by their addresses. Each is a region: one operator to the runtime. So is a model that
AOTInductor has packaged.

Inductor, which makes them, is loaded only where a program compiles something; it is prepared when it is.
"""

import re

import torch

from . import _intercepted
from ._kernels import by_address
from ._loaded import when_loaded
from ._regions import tensors_in, within

# Operators of others may keep things to themselves, and give other bits when they run again.
_OPERATORS = re.compile(r"\btorch\.ops\.(\w+)\.")
_FUNCTIONS = {"aten", "prims", "inductor", "_quantized", "quantized", "mkl", "mkldnn", "onednn"}
_COMMUNICATION = re.compile(r"\bops\.(\w*c10d\w*|symm_mem)\.|\bempty_strided_p2p\(")
_COMMUNICATION_IN_CPP = re.compile(r"c10d|symm_mem|p2p")


class _Layout:
    """What a graph takes, and what it does with that."""

    def __init__(self, graph, run, inputs):
        # Alive, for it may have to run again when the program has forgotten it.
        self.graph = graph
        self.run = run
        # A backward graph may reuse what only it needs, and does not say so.
        written = set(range(len(inputs)) if graph.fx_kwargs["is_backward"] else graph.mutated_input_idxs)
        tensors = [index for index, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        self.read = [index for index in tensors if index not in written]
        self.written = [index for index in tensors if index in written]
        self.numbers = [index for index, value in enumerate(inputs) if isinstance(value, int)]
        self.constants = tensors_in(_constants.get(id(graph)) or graph.constants or {})
        is_understood = len(tensors) + len(self.numbers) == len(inputs)
        is_function = _FUNCTIONS.issuperset(_OPERATORS.findall(graph.source_code))
        # Random numbers are drawn again by the generator of the tensors' device: none may be drawn on another and sent there.
        devices = {inputs[index].device for index in tensors}
        is_of_one_device = len(devices) == 1 and {device.type for device in devices}.issuperset(graph.device_types)
        # What is generated in C++ calls operators by other names.
        is_cpp = graph.fx_kwargs.get("cpp_wrapper")
        if (_COMMUNICATION_IN_CPP if is_cpp else _COMMUNICATION).search(graph.source_code):
            self.operator = "plimsoll::communicating_region"
        elif is_understood and is_function and is_of_one_device and not is_cpp:
            self.operator = "plimsoll::region"
        else:
            self.operator = "plimsoll::region_once"

    def enter(self, inputs):
        read, written, numbers = ([inputs[index] for index in kind] for kind in (self.read, self.written, self.numbers))
        torch.ops.plimsoll.enter_region(read + self.constants, written, numbers, id(self.graph), self.operator)

    def inputs(self, read, written, numbers):
        """The inputs of which these are the tensors, constants among them, and the numbers."""
        placed = dict(zip(self.read + self.written + self.numbers, [*read[: len(self.read)], *written, *numbers]))
        return [placed[index] for index in range(len(placed))]


# By the id of a graph.
_layouts = {}
_constants = {}


def _layout_of(graph, run, inputs):
    layout = _layouts.get(id(graph))
    if layout is None:
        layout = _layouts[id(graph)] = _Layout(graph, run, inputs)
    return layout


def run_as_region(graph, run, inputs):
    """What `run` makes of a graph and its inputs: a list of their own, which it may let go of."""
    if not _intercepted.is_under_way():
        return run(graph, inputs)
    layout = _layout_of(graph, run, inputs)
    return within(lambda: layout.enter(inputs), lambda: run(graph, inputs), tensors_in)


def _run_again(read, written, numbers, graph):
    layout = _layouts[graph]
    return tensors_in(layout.run(layout.graph, layout.inputs(read, written, numbers)))


def _prepare_inductor(module):
    graphs = module.CompiledFxGraph
    run, post_compile = graphs.__call__, graphs.post_compile

    def post_compile_without_cuda_graphs(graph, inputs, constants, asked):
        if asked["cudagraphs"]:
            module.BoxedBool.disable(asked["cudagraphs"])
            module.log_cudagraph_skip_and_bump_counter("skipping cudagraphs: tensors move within a budget")
        # Frozen parameters are among them.
        _constants[id(graph)] = constants.unwrap(graph)
        return post_compile(graph, inputs, constants, asked)

    graphs.__call__ = lambda graph, inputs: run_as_region(graph, run, inputs)
    graphs.post_compile = post_compile_without_cuda_graphs


for _kind in ("PackageLoader", "ContainerRunnerCpu", "ContainerRunnerCuda"):
    _package = getattr(torch._C._aoti, f"AOTIModel{_kind}", None)
    for _name in ("run", "boxed_run"):
        if _run := getattr(_package, _name, None):
            setattr(_package, _name, by_address(_run))


_library = torch.library.Library("plimsoll", "FRAGMENT")
_library.impl("region", _run_again, "CompositeExplicitAutograd")
when_loaded("torch._inductor.output_code", _prepare_inductor)
