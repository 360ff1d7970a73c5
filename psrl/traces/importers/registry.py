"""All importers: those of psRL and those that installed packages add."""

from functools import cache
from importlib.metadata import entry_points

from psrl.core.errors import ConfigError

from .agent_lightning import AGENT_LIGHTNING
from .areal import AREAL
from .atif import ATIF
from .azure_llm import AZURE_LLM
from .claude_code import CLAUDE_CODE
from .fireact import FIREACT
from .formats import Importer
from .knowagent import KNOWAGENT_ALFWORLD, KNOWAGENT_HOTPOTQA
from .messages import MESSAGES, TAU_BENCH
from .mooncake import MOONCAKE
from .nemo_rl import NEMO_RL
from .react_webshop import REACT_WEBSHOP
from .slime import SLIME
from .swe_agent import SWE_AGENT
from .toolbench import TOOLBENCH
from .tree_of_thought import TREE_OF_THOUGHT
from .verifiers import VERIFIERS
from .verl_tensors import VERL_DATA_PROTO, VERL_TRANSFER_QUEUE
from .verl_text import VERL_TEXT

ENTRY_POINT_GROUP = "psrl.importers"

IMPORTERS: dict[str, Importer] = {
    "agent_lightning": AGENT_LIGHTNING,
    "areal": AREAL,
    "atif": ATIF,
    "azure_llm": AZURE_LLM,
    "claude_code": CLAUDE_CODE,
    "fireact": FIREACT,
    "knowagent_alfworld": KNOWAGENT_ALFWORLD,
    "knowagent_hotpotqa": KNOWAGENT_HOTPOTQA,
    "messages": MESSAGES,
    "mooncake": MOONCAKE,
    "nemo_rl": NEMO_RL,
    "react_webshop": REACT_WEBSHOP,
    "slime": SLIME,
    "swe_agent": SWE_AGENT,
    "tau_bench": TAU_BENCH,
    "toolbench": TOOLBENCH,
    "tree_of_thought": TREE_OF_THOUGHT,
    "verifiers": VERIFIERS,
    "verl_data_proto": VERL_DATA_PROTO,
    "verl_text": VERL_TEXT,
    "verl_transfer_queue": VERL_TRANSFER_QUEUE,
}


@cache
def all_importers() -> dict[str, Importer]:
    """Importers by format name: psRL's, then those of the entry point group psrl.importers.

    Raises:
        ConfigError: if an entry point cannot be loaded, is no `Importer`, or takes a name that
            is in use.
    """
    found = dict(IMPORTERS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        package = f"entry point '{point.name} = {point.value}' of {ENTRY_POINT_GROUP}"
        hint = "correct or uninstall the package that declares it"
        if point.name in found:
            raise ConfigError(f"{package}: the format name is in use", hint)
        try:
            importer = point.load()
        except Exception as error:  # the package may raise anything while it is imported
            raise ConfigError(f"{package} cannot be loaded ({error})", hint) from None
        if not isinstance(importer, Importer):
            raise ConfigError(f"{package} is a {type(importer).__name__}, not an Importer", hint)
        found[point.name] = importer
    return found
