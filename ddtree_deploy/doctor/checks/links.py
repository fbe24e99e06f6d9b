"""Checks of how the GPUs reach each other."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.doctor.common import chosen, devices, services, some
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning

_P2P_OFF = "NCCL_P2P_DISABLE"
_MIB = 1024 * 1024


def _several(facts: Facts) -> bool:
    """Whether transfers between GPUs matter here at all."""
    planned = services(facts)
    return len(devices(facts)) > 1 and (not planned or any(service.settings.tp > 1 for service in planned))


@check("DD250")
def peer_to_peer(facts: Facts) -> Iterator[Saying]:
    if not _several(facts):
        return
    pairs = []
    for one, row in facts.at("gpu").table("p2p").items():
        pairs += [f"{one}-{other}: {state}" for other, state in _row(row) if state != "OK"]
    if not pairs:
        return
    off = [service.name for service in services(facts) if service.settings.environment.get(_P2P_OFF) == "1"]
    if off:
        yield note(
            "GPUs do not reach each other, and peer transfers are off",
            some(pairs),
            f"{_P2P_OFF}=1 in {some(off)}",
        )
        return
    yield warning(
        "GPUs do not reach each other peer to peer",
        some(pairs),
        "the first all-reduce may hang",
        mend="switch the IOMMU and ACS off in the BIOS (DD251, DD252); as a last resort set "
        f"{_P2P_OFF} = 1 in the service's environment: all traffic then goes through main memory",
    )


@check("DD251")
def iommu(facts: Facts) -> Iterator[Saying]:
    if not _several(facts):
        return
    bus = facts.at("bus")
    kinds = bus.at("iommu")
    translating = [f"{kinds.integer(kind)} groups of type {kind}" for kind in ("DMA", "DMA-FQ") if kinds.has(kind)]
    if translating:
        yield warning(
            "the IOMMU translates the devices' transfers",
            *translating,
            f"kernel command line: {bus.text('cmdline')}",
            mend="switch it off in the BIOS, or boot with `iommu=pt`; all-reduces over PCIe are known to hang without",
        )


@check("DD252")
def access_control(facts: Facts) -> Iterator[Saying]:
    if not _several(facts):
        return
    bus = facts.at("bus")
    redirecting = bus.texts("acs_redirecting")
    if redirecting:
        yield warning(
            "PCIe bridges send peer transfers up to the root (ACS)",
            f"{len(redirecting)} of {bus.integer('bridges')} bridges: {some(redirecting)}",
            mend="switch ACS off in the BIOS, or clear it on these bridges at boot: `setpci -s BRIDGE ECAP_ACS+6.w=0`",
        )
    elif not bus.flag("acs_readable"):
        yield note(
            "not known: whether PCIe bridges redirect peer transfers",
            "the kernel shows their extended configuration to root alone",
            mend="run the doctor as root: --sudo",
        )
    if bus.maybe_text("uvm_disable_hmm") == "N":
        yield note(
            "the driver's heterogeneous memory management is on",
            "named as a cause of hangs of peer transfers on PCIe hosts",
            mend="if all-reduces hang: `options nvidia_uvm uvm_disable_hmm=1` in /etc/modprobe.d",
        )


@check("DD253")
def topology(facts: Facts) -> Iterator[Saying]:
    if not _several(facts):
        return
    table = facts.at("gpu").table("links")
    for service in services(facts):
        names = {f"GPU{device.integer('index')}" for device in chosen(service, facts)}
        far = [
            f"{one}-{other}"
            for one in sorted(names & set(table))
            for other, how in _row(table[one])
            if other in names and one < other and how == "SYS"
        ]
        if len(names) < service.settings.tp:
            continue  # DD204 says so
        if far and len(names) < len(table):
            yield warning(
                f"{service.name}: its GPUs lie on two sockets",
                some(far),
                mend="list GPUs of one socket in `gpus`, where there are enough",
            )
        elif far:
            yield note(
                f"{service.name}: its GPUs lie on two sockets, as all of the host do",
                "several services on fewer GPUs each, within a socket, give more tokens for small models",
            )


def _row(row: Facts) -> list[tuple[str, str]]:
    names = row.value if isinstance(row.value, dict) else {}
    return [(name, row.text(name)) for name in names]


@check("DD254")
def all_reduce(facts: Facts) -> Iterator[Saying]:
    deep = facts.maybe("deep")
    if deep is None:
        return
    skipped = deep.maybe_text("skipped")
    if skipped is not None:
        yield note("the deep checks were not run", skipped, mend="stop what holds the GPUs, or add --live")
        return
    result = deep.at("all_reduce")
    size, seconds = result.integer("bytes"), result.number("seconds")
    times, wrong = [], []
    failed: dict[str, list[str]] = {}
    for number, rank in result.table("ranks").items():
        why = rank.maybe_text("error")
        if why is not None:
            failed.setdefault(why, []).append(number)
        elif not rank.flag("right"):
            wrong.append(number)
        else:
            times.append(rank.number("seconds"))
    for why, numbers in failed.items():
        hangs = "no answer" in why or "no end" in why or "imed out" in why
        yield error(
            f"an all-reduce {'hangs' if hangs else 'fails'} on GPU {some(numbers, 16)}",
            why,
            f"{size // _MIB} MiB, limit {seconds:g} s",
            mend="look at DD250 to DD252 and at `dmesg`; NCCL_DEBUG=INFO in its environment says where it stops",
        )
    if wrong:
        yield error(
            f"an all-reduce gives wrong sums on GPU {some(wrong, 16)}",
            "peer transfers are damaged on the way",
            mend="switch ACS and the IOMMU off in the BIOS; until then NCCL_P2P_DISABLE = 1",
        )
    if len(times) > 1 and not failed and not wrong:
        ranks, slowest = len(times), max(times)
        rate = 2 * (ranks - 1) / ranks * size / slowest / 1e9 if slowest else 0.0
        yield note(
            f"an all-reduce of {size // _MIB} MiB takes {slowest * 1e3:.2f} ms over {ranks} GPUs",
            f"{rate:.1f} GB/s on the bus",
        )


@check("DD255")
def kernel_imports(facts: Facts) -> Iterator[Saying]:
    deep = facts.maybe("deep")
    if deep is None or deep.maybe_text("skipped") is not None:
        return
    for name, result in deep.table("imports").items():
        why = result.maybe_text("error")
        if why is not None:
            yield error(
                f"{name} cannot be imported after torch",
                why,
                mend="look at the findings on the CUDA stack (DD220 to DD227); else install it again",
            )
