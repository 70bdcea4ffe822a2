"""Which process of a run this is, as what started it says by environment variables: an address, a count, a number.

Understood are JAX's own variables, and those of torchrun (Ray Train sets the same), SLURM, SkyPilot and dstack.
"""

import dataclasses
import ipaddress
import re
from collections.abc import Callable, Mapping

from jepa_jax.base.companions import PLACE_VARIABLES, TOKEN_VARIABLE
from jepa_jax.base.errors import UserError
from jepa_jax.runtime.gpus import count_gpus

KUBERNETES_INDEX = "JOB_COMPLETION_INDEX"  # of a pod in an indexed Job
LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"  # numbers of the GPUs that a process may use, separated by commas
PORT_VARIABLE = "JAX_COORDINATOR_PORT"  # where the address of process 0 comes without one
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
DEFAULT_PORT = "8476"
NODE_VARIABLES = (  # addresses of the nodes, that of process 0 first; how many there are; number of this one
    ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK"),
    ("DSTACK_MASTER_NODE_IP", "DSTACK_NODES_NUM", "DSTACK_NODE_RANK"),
)
ANY = "[::]"  # all addresses of a machine


@dataclasses.dataclass(frozen=True)
class Place:
    """One of the processes that compute a run.

    Attributes:
      address: HOST:PORT of process 0.
      count: number of processes.
      index: which of them this one is.
      local_index: which of the `local_count` ones on its machine; None if what started it does not say.
    """

    address: str
    count: int
    index: int
    local_index: int | None = None
    local_count: int = 1
    bind: str = ""
    token: str = ""

    @property
    def host(self) -> str:
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def bind_address(self) -> str:
        """Where process 0 listens: the address given, and all of its machine's only if that is a name.

        Other machines may know the name by another address than this one does.
        """
        if self.bind:
            return self.bind
        return self.address if self.host == "localhost" or _is_number(self.host) else f"{ANY}:{self.port}"

    def device_ids(self, environment: Mapping[str, str]) -> list[int] | None:
        """Returns the numbers of the GPUs that this process takes of those that it sees; None: all of them."""
        if environment.get(LOCAL_DEVICES):
            return [int(number) for number in environment[LOCAL_DEVICES].split(",")]
        visible = count_gpus(environment)
        if self.local_index is None or self.local_count == 1 or visible <= 1:
            return None  # of one that it sees, the others see others
        share = visible // self.local_count
        if not share:
            raise UserError(
                f"{self.local_count} processes on this machine and {visible} GPUs: start one process per GPU at most"
            )
        return list(range(self.local_index * share, (self.local_index + 1) * share))


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Returns the place of this process, or None if it computes alone."""
    readers: tuple[Callable[[Mapping[str, str]], Place | None], ...] = (
        _of_jax, _of_torchrun, _of_slurm, _of_nodes,
    )  # fmt: skip
    place = next(filter(None, (reader(environment) for reader in readers)), None)
    bind, token = environment.get(BIND_VARIABLE, ""), environment.get(TOKEN_VARIABLE, "")
    return place and dataclasses.replace(place, bind=bind, token=token)


def _of_jax(environment: Mapping[str, str]) -> Place | None:
    if PLACE_VARIABLES[0] not in environment:
        return None
    values = dict(environment)
    if KUBERNETES_INDEX in values:
        values.setdefault(PLACE_VARIABLES[2], values[KUBERNETES_INDEX])
    if missing := [name for name in PLACE_VARIABLES if name not in values]:
        raise UserError(f"{PLACE_VARIABLES[0]} is set but {' and '.join(missing)} is not; set all three")
    return _place(values, values[PLACE_VARIABLES[0]], *PLACE_VARIABLES[1:])


def _of_torchrun(environment: Mapping[str, str]) -> Place | None:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in environment for name in names) or environment["WORLD_SIZE"] == "1":
        return None
    # torchrun's own store listens at MASTER_PORT for as long as the processes run
    port = environment.get(PORT_VARIABLE) or str(_number(environment, "MASTER_PORT") + 1)
    address = _with_port(environment["MASTER_ADDR"], port)
    if "LOCAL_RANK" not in environment or "LOCAL_WORLD_SIZE" not in environment:
        return _place(environment, address, "WORLD_SIZE", "RANK")
    local = _number(environment, "LOCAL_RANK"), _number(environment, "LOCAL_WORLD_SIZE")
    return _place(environment, address, "WORLD_SIZE", "RANK", *local)


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    """Returns the place of a process that `srun` started as one of several; a batch script itself is none."""
    tasks = environment.get("SLURM_NTASKS", "1")
    if not tasks.isdecimal():
        raise UserError(f"SLURM_NTASKS = {tasks}: not a number; unset it, or start with srun")
    if tasks == "1" or any(name not in environment for name in ("SLURM_PROCID", "SLURM_STEP_NODELIST")):
        return None
    port = environment.get(PORT_VARIABLE) or str(61440 + int(environment.get("SLURM_JOB_ID", 0)) % 4096)
    address = _with_port(_first_node(environment["SLURM_STEP_NODELIST"]), port)
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    counts = [int(tasks) for tasks, times in _COUNTS.findall(per_node) for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID") if len(counts) > 1 else 0
    local = (_number(environment, "SLURM_LOCALID"), counts[node]) if node < len(counts) else (None, 1)
    return _place(environment, address, "SLURM_NTASKS", "SLURM_PROCID", *local)


_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # "8(x2),4": two nodes of eight tasks, one of four


def _first_node(nodes: str) -> str:
    """Returns the first of SLURM's node names, as in gpu[003,007-9],other."""
    name, bracket, inside = re.match(r"([^,\[]+)(\[?)(\w*)", nodes).groups()  # type: ignore[union-attr]
    return name + inside if bracket else name


def _of_nodes(environment: Mapping[str, str]) -> Place | None:
    """Returns the place of a process that is the only one of its node."""
    for addresses, count, index in NODE_VARIABLES:
        if environment.get(count, "1") != "1" and (listed := environment.get(addresses, "").split()):
            address = _with_port(listed[0], environment.get(PORT_VARIABLE, DEFAULT_PORT))
            return _place(environment, address, count, index)
    return None


def _with_port(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise UserError(f"{name} = {value}: not a number; what starts the processes has to set it")
    return int(value)


def _place(
    environment: Mapping[str, str],
    address: str,
    count: str,
    index: str,
    local_index: int | None = None,
    local_count: int = 1,
) -> Place:
    """Returns a place, of which two variables name the number of processes and that of this one."""
    numbers = environment.get(count, ""), environment.get(index, "")
    host, _, port = address.rpartition(":")
    right = host and all(text.isdecimal() for text in (*numbers, port)) and int(port) < 65536
    if not right or int(numbers[1]) >= int(numbers[0]):
        given = f"{address}, {count} = {numbers[0]}, {index} = {numbers[1]}"
        raise UserError(f"{given}: need HOST:PORT, a number of processes, and a number below it")
    return Place(address, int(numbers[0]), int(numbers[1]), local_index, local_count)


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
