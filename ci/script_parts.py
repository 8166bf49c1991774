"""What the scripts that reproduce a fault have in common, as source text.

The text runs without kvproof: the standard library, torch and SGLang are all it imports. Each part is there
only where a script uses it; `script.py` says where. The text is formatted as this repository is.
"""

from typing import Final

MAIN: Final = """
def main():
    if importlib.util.find_spec("sglang") is None:
        print(f"sglang cannot be imported here; run: pip install sglang=={RELEASE}")
        return 2
    stand_in_for_absent_packages()
    try:
        reproduce()
    except Exception as error:
        print(f"this script does not fit the sglang that is installed: {type(error).__name__} {error}")
        return 2
    found = sys.modules["sglang"].__version__
    if found != RELEASE:
        print(f"this is sglang {found}; the calls were written for {RELEASE}")
    print("the fault shows" if DIFFERENCES else "the fault does not show")
    return 1 if DIFFERENCES else 0
"""

COMPARE: Final = '''
# --- calling and comparing ----------------------------------------------------------------------------------

ANSWERS = []
DIFFERENCES = []


def tensor(values, dtype=torch.int64, device=DEVICE):
    return torch.tensor(values, dtype=dtype, device=device)


def call(function, *args, **kwargs):
    """Make the call. Returns a list of slots, None, or in words what it raised."""
    inspect.signature(function).bind(*args, **kwargs)  # a release that wants other arguments is not at fault
    try:
        answer = function(*args, **kwargs)
        if isinstance(answer, torch.Tensor):
            ANSWERS.append(answer)
            return answer.tolist()
        return answer
    except Exception as error:
        return f"{type(error).__name__} {error}".strip()[:200]


def compare(what, expected, got):
    if expected == got:
        return
    DIFFERENCES.append(what)
    if isinstance(expected, dict) and isinstance(got, dict):
        same = expected.items() & got.items()
        expected, got = (dict(entry for entry in one.items() if entry not in same) for one in (expected, got))
        what += ", where it differs"
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) > 20:
        same = Counter(expected) & Counter(got)
        if same != Counter(expected) or same != Counter(got):  # and not only their order
            expected, got = (list((Counter(one) - same).elements()) for one in (expected, got))
            what += ", where they differ"
    print(f"{what}: expected {expected}, got {got}")


def compare_all(expected, got):
    for what in expected:
        compare(what, expected[what], got[what])
'''

ON_COURSE: Final = '''

def on_course(number, got, then):
    """Stop unless a call came to what it came to in the release: the calls behind it are written for that."""
    if got != then:
        print(f"call {number}: got {got}, where sglang {RELEASE} gave {then}; the later calls do not fit")
        sys.exit(2)
'''

PAGES: Final = '''

def pages(pool):
    """Numbers of the pages that are free, or released and waiting to be merged; in any order, so sorted."""
    free = pool.free_slots if hasattr(pool, "free_slots") else pool.free_pages
    waiting = [getattr(pool, "release_pages", None), *getattr(pool, "staged_pages", ())]
    return sorted(page for numbers in (free, *waiting) if numbers is not None for page in numbers.tolist())
'''

CLASS_PAGES: Final = '''

def class_pages(allocator, number):
    """Numbers of one class's pages that are free, or released and waiting to be merged, sorted."""
    lists = allocator.class_free_pages[number], allocator.class_release_pages[number]
    return sorted(page for numbers in lists for page in numbers.tolist())
'''

ENTRIES: Final = '''

def entries(mapping):
    """The entries of a side mapping that are not 0, by index."""
    return {index: value for index, value in enumerate(mapping) if value}


def peers(mapping, slots, each=1):
    """What a side mapping says of these slots; each: slots that one of its entries stands for."""
    places = slots if each == 1 else [slot // each for slot in slots if slot % each == each - 1]
    return [mapping[place] if 0 <= place < len(mapping) else "outside" for place in places]
'''

UNLIKE: Final = '''

def compare_slots(what, expected, got, rows, free, page_size, state=None):
    """Compare slots with those expected, or with others that the contract allows just as well.

    rows: lengths of each row before and after, and its last slot before the call. A token goes into the slot
    behind the last one while its page has room, else into the first slot of any page in `free`. state: the
    dict in which "free pages" is corrected when other pages than expected were taken.
    """
    if got == expected:
        return
    wrong = forbidden(got, rows, set(free), page_size)
    if wrong:
        compare(what, expected, f"{got} ({wrong})")
    elif state is None:
        print(f"{what}: got {got}, allowed as well as {expected}, but what follows is written for the latter")
        sys.exit(2)
    else:
        other, taken = ({slot // page_size for slot in slots} for slots in (expected, got))
        state["free pages"] = sorted({*state["free pages"], *(other - taken)} - (taken - other))


def forbidden(slots, rows, free, page_size):
    """Why the contract does not allow these slots, or nothing. Takes pages out of `free`."""
    tokens = sum(after - before for before, after, _ in rows)
    if not isinstance(slots, list) or len(slots) != tokens:
        return f"{tokens} slots are due"
    rest = iter(slots)
    for before, after, last in rows:
        for position in range(before, after):
            slot = next(rest)
            if position % page_size:
                if slot != last + 1:
                    return f"{last + 1} is due for token {position} of a row"
            elif slot % page_size or slot // page_size not in free:
                return f"{slot} does not begin a page that was free"
            else:
                free.remove(slot // page_size)
            last = slot
    return ""
'''

MEMORY: Final = '''
# --- what kernels read and write ----------------------------------------------------------------------------
# Triton's interpreter runs the kernels here, and loads and stores through one object. `Memory` takes its
# place and looks at every address: is it in one of the tensors that the kernel was given?

BEHIND = 1_000_003  # stands behind each free list, and is what a read outside all tensors gives


class Memory:
    """The interpreter's memory. strays: accesses outside the kernel's tensors, which are not performed."""

    def __init__(self):
        interpreter = sys.modules["triton.runtime.interpreter"]
        self.strays, self.kernel, self.tensors = [], "", {}
        self.real, interpreter._interpreter = interpreter._interpreter, self
        launch = interpreter.GridExecutor.__call__

        def launch_watched(executor, *args, **kwargs):
            given = {**dict(zip(executor.arg_names, args)), **kwargs}
            self.tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
            self.kernel = executor.fn.__name__
            return launch(executor, *args, **kwargs)

        interpreter.GridExecutor.__call__ = launch_watched

    def __getattr__(self, name):
        return getattr(self.real, name)

    def load(self, addresses, mask, other, dtype):
        mask, other = mask.astype(bool), other.copy()
        for lane in self.outside("read", addresses, mask):
            mask.flat[lane], other.flat[lane] = False, BEHIND
        return self.real.load(addresses, mask, other, dtype)

    def store(self, addresses, values, mask):
        mask = mask.astype(bool)
        for lane in self.outside("write", addresses, mask):
            mask.flat[lane] = False
        return self.real.store(addresses, values, mask)

    def outside(self, what, addresses, mask):
        lanes = [lane for lane, active in enumerate(mask.flat) if active]
        strays = [lane for lane in lanes if not self.within(int(addresses.flat[lane]))]
        for lane in strays:
            self.strays.append(f"{self.kernel}: {what} {self.place(int(addresses.flat[lane]))}")
        return strays

    def within(self, address):
        return any(0 <= address - one.data_ptr() < one.nbytes for one in self.tensors.values())

    def place(self, address):
        """The address as an element of the tensor that it is not far behind; an empty one begins at 0."""
        for name, one in self.tensors.items():
            place = (address - one.data_ptr()) // one.element_size()
            if 0 <= place < one.numel() + 64:
                return f"of {name}[{place}], which has {one.numel()} elements"
        return "far from every tensor"


def mark_behind(pool):
    """Make the free list the beginning of a longer tensor, so that it is known what stands behind it."""
    free = pool.free_pages
    longer = torch.cat([free, torch.full((64,), BEHIND, dtype=free.dtype, device=free.device)])
    pool.free_pages = longer[: free.numel()]
'''

UNDEFINED: Final = '''

def leave_lanes_undefined():
    """Give every masked load without `other` numbers of its own in the lanes that it leaves out.

    Triton leaves those lanes undefined. Its interpreter happens to put 0 there, a compiler may not.
    """
    builder, loads = sys.modules["triton.runtime.interpreter"].InterpreterBuilder, itertools.count(1)
    load_masked = builder.create_masked_load

    def load(self, addresses, mask, other, *options):
        loaded = load_masked(self, addresses, mask, other, *options)
        if other is None:
            loaded.data = loaded.data.copy()
            loaded.data[~mask.data.astype(bool)] = 100_000 * next(loads)
        return loaded

    builder.create_masked_load = load
'''

FILLED: Final = '''
# --- what torch.empty gives out -----------------------------------------------------------------------------

NOT_WRITTEN = -1_000_003
FILLED = []
empty = torch.empty


def filled_empty(*args, **kwargs):
    """torch.empty, with one number all over the new tensor and in 8 elements on either side of it."""
    like = empty(*args, **kwargs)
    if like.dtype not in (torch.int64, torch.int32):
        return like
    longer = torch.full((like.numel() + 16,), NOT_WRITTEN, dtype=like.dtype, device=like.device)
    FILLED.append(longer)
    return longer[8:-8].view(like.shape)


def around():
    """What stands around the tensors that torch.empty gave out, where it has changed."""
    words = [number for longer in FILLED for number in (*longer[:8].tolist(), *longer[-8:].tolist())]
    return [number for number in words if number != NOT_WRITTEN]
'''

STAND_INS: Final = '''
# --- packages that are not installed ------------------------------------------------------------------------
# The allocators need torch and Triton, but around them SGLang imports the packages of a whole server. Where
# one of those is not installed, an empty module takes its place. Where all are, nothing here does anything.


class Anything(type):
    """A class that stands for whatever an absent package has under some name."""

    def __new__(mcs, name, bases, body, **options):
        return super().__new__(mcs, name, bases, body)

    def __init__(cls, name, bases, body, **options):
        super().__init__(name, bases, body)

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, anything(name))
        return getattr(cls, name)

    def __setitem__(cls, key, value):
        pass

    def __ge__(cls, other):
        return True  # a version, most likely: new enough

    def __call__(cls, *args, **kwargs):
        return anything(cls.__name__)


def anything(name):
    return Anything(name, (), {"__get_pydantic_core_schema__": classmethod(lambda *_: {"type": "any"})})


class EmptyModule(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, anything(name))
        return getattr(self, name)


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds an empty module where SGLang imports what is absent, unless it catches the ImportError itself."""

    served = set()

    def find_spec(self, fullname, path=None, target=None):
        top = fullname.partition(".")[0]
        if top in {"sglang", "torch", "triton", *sys.stdlib_module_names}:
            return None
        frame = importing_frame(sys._getframe(1))
        if (top != fullname and top not in self.served) or not is_sglang(frame) or is_caught(frame):
            return None
        self.served.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return EmptyModule(spec.name)

    def exec_module(self, module):
        pass


def importing_frame(frame):
    """Where the import statement stands; None if somebody only asks whether there is such a package."""
    loads = False
    while frame and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen_importlib")):
        loads = loads or frame.f_code.co_name == "_find_and_load"
        frame = frame.f_back
    return frame if loads else None


def is_sglang(frame):
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "sglang"


def is_caught(frame):
    """Whether an ImportError raised there meets a handler in SGLang."""
    while frame:
        if is_sglang(frame) and any(frame.f_lineno in body for body in guarded(frame.f_code.co_filename)):
            return True
        frame = frame.f_back
    return False


@functools.cache
def guarded(filename):
    """The lines in a file where an ImportError is caught and not raised again."""
    tries = [node for node in ast.walk(ast.parse(Path(filename).read_bytes())) if isinstance(node, ast.Try)]
    return [range(node.body[0].lineno, node.body[-1].end_lineno + 1) for node in tries if swallows(node)]


def swallows(node):
    for handler in node.handlers:
        types = ast.walk(handler.type) if handler.type else [ast.Name("Exception")]
        names = {node.id for node in types if isinstance(node, ast.Name)}
        if names & {"ImportError", "ModuleNotFoundError", "Exception", "BaseException"}:
            return not any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
    return False


def stand_in_for_absent_packages():
    sys.meta_path.append(EmptyModules())
    json.JSONEncoder.default = lambda self, value: str(value)  # some modules dump what a package gave them
    # Older releases import these from Triton, newer Triton has them no more; the allocators use neither.
    with contextlib.suppress(ImportError):
        cache = importlib.import_module("triton.runtime.cache")
        for name in ("default_cache_dir", "default_dump_dir", "default_override_dir"):
            if not hasattr(cache, name):
                setattr(cache, name, anything(name))
'''
