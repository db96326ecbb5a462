"""The script that dlrover-run runs for dlrover_run.launch: it calls the function that lies in a private directory.

Its result, or its exception, goes to a file of that directory, which has the process id as its name.
"""
import json
import multiprocessing.process
import multiprocessing.spawn
import os
import pickle
import sys
import time
import traceback

MOST = 1 << 30  # bytes of a function with its arguments, or of a result
CALL = "call"  # name of the file with the function


class Unsendable(Exception):
    """An object cannot travel between processes."""


def pack(what, thing, look_up_main=True):
    """Pickles things by name if they can be imported, and otherwise by value, with cloudpickle.

    look_up_main: the reader has the same __main__, so that names in it are names to the reader as well.
    """
    try:
        data = pickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
        reason = None if look_up_main or b"__main__" not in data else "it is defined in this session, and in no file"
    except Exception as e:  # those of objects' own methods, too
        reason = "%s: %s" % (type(e).__name__, e)
    if reason is not None:
        try:
            import cloudpickle
        except ImportError:
            raise Unsendable("%s cannot be sent to another process (%s): pip install cloudpickle for %s, or move its "
                             "definition into a module" % (what, reason, sys.executable)) from None
        try:
            data = cloudpickle.dumps(thing, pickle.HIGHEST_PROTOCOL)
        except Exception as e:
            raise Unsendable("%s cannot be sent to another process: %s: %s" % (what, type(e).__name__, e)) from e
    if len(data) > MOST:
        raise Unsendable("%s has %d bytes when it is pickled, and at most %d can be sent to another process: write it "
                         "to a file, and send the file's name" % (what, len(data), MOST))
    return data


def main(directory):
    forget_own_directory()
    try:
        function, args = load(os.path.join(directory, CALL))
        value = function(*args)
    except SystemExit as e:
        if e.code:
            raise
        value = None
    except Exception as e:
        begin = e.__traceback__.tb_next or e.__traceback__  # without this function
        trace = "".join(traceback.format_exception(type(e), e, begin))
        message = "".join(traceback.format_exception_only(type(e), e)).strip()
        write(directory, pickle.dumps({"time": time.time(), "message": message, "traceback": trace}))
        tell_launcher(message, trace)
        raise
    write(directory, packed_value(value))


def forget_own_directory():
    """Python puts the script's directory first on the path; its modules have names that others have, too."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]


def load(path):
    """Prepares this process as multiprocessing does with the start method spawn, and loads the call."""
    with open(path, "rb") as f:
        parent = pickle.load(f)
        parent["sys_path"] = [p for p in sys.path if p not in parent["sys_path"]] + parent["sys_path"]
        process = multiprocessing.process.current_process()
        process._inheriting = True  # a script that calls launch when it is imported gets an error that explains it
        try:
            multiprocessing.spawn.prepare(parent)
            return pickle.load(f)
        finally:
            del process._inheriting


def packed_value(value):
    try:
        return pack("the result of rank %s" % os.environ["RANK"], {"value": value})
    except Unsendable as e:
        return pickle.dumps({"unsendable": str(e)})  # it would fail again after a restart


def write(directory, data):
    path = os.path.join(directory, str(os.getpid()))
    with open(path + ".new", "wb") as f:
        f.write(data)
    os.replace(path + ".new", path)


def tell_launcher(message, trace):
    """Writes the error file of torchrun's workers, from which the launcher names the cause."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with open(path, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": {
                "py_callstack": trace, "timestamp": str(int(time.time()))}}}, f)


if __name__ == "__main__":
    main(sys.argv[1])
