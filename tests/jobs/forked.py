"""Runs programs, each in a process of its own that begins with torch imported: that takes most of a short job's time.

Prints a port of this machine. Whoever connects to it sends a line of JSON, {"program", "arguments", "environment"}, and gets one when
the program has ended: {"succeeded", "printed", "complaint"}. Ends when its standard input does.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile

import torch
import torch._dynamo  # which any optimizer imports


def serve(connection):
    request = json.loads(connection.makefile().readline())
    with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as complaint:
        program = os.fork()
        if not program:
            connection.close()
            os.dup2(printed.fileno(), 1)
            os.dup2(complaint.fileno(), 2)
            os.environ.update(request["environment"])
            sys.argv = [request["program"], *request["arguments"]]
            runpy.run_path(request["program"], run_name="__main__")
            return
        _, status = os.waitpid(program, 0)
        found = {"succeeded": status == 0}
        for what, file in [("printed", printed), ("complaint", complaint)]:
            file.seek(0)
            found[what] = file.read().decode(errors="replace")
        connection.sendall(json.dumps(found).encode())
    os._exit(0)


def main():
    # What a program finds here when it begins does not have to be gone through when it ends.
    gc.collect()
    gc.freeze()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            if not os.fork():
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                return serve(connection)
            connection.close()


if __name__ == "__main__":
    main()
