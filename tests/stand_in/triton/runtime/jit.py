class JITFunction:
    def __init__(self, function):
        self.function = function

    def run(self, *given, grid, warmup, **named):
        of = lambda value: value.data_ptr() if hasattr(value, "data_ptr") else value
        for place in range(0 if warmup else grid[0]):
            self.function(place, *map(of, given), **named)

    def __getitem__(self, grid):
        return lambda *given, **named: self.run(*given, grid=grid, warmup=False, **named)


jit = JITFunction
