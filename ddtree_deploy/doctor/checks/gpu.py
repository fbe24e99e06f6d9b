"""Checks of the driver and the GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from ddtree_deploy.doctor.common import (
    BLACKWELL,
    capability,
    chosen,
    devices,
    dotted,
    plural,
    services,
    shown,
    some,
    torch_cuda,
)
from ddtree_deploy.doctor.facts import Facts
from ddtree_deploy.doctor.findings import Saying, check, error, note, warning

# CUDA version from which -> the oldest driver that runs it.
_DRIVERS = (((13, 0), "580.65.06"), ((12, 8), "570"), ((12, 0), "525.60.13"))
_BLACKWELL_CUDA = (12, 8)
# Name of a GPU -> its memory in MiB as the driver shows it without MIG or a damaged page pool.
_MEMORY_MIB = {"RTX PRO 6000 Blackwell": 95_000}
_USED_MIB = 2048  # what an idle GPU may show as used
_FULL_WIDTH = 16


@check("DD201")
def driver_answers(facts: Facts) -> Iterator[Saying]:
    gpu = facts.at("gpu")
    why = gpu.at("smi").maybe_text("error")
    loaded = gpu.maybe("module") is not None
    if why is not None:
        mend = (
            "install the driver's nvidia-utils package"
            if loaded and "not found" in why
            else "reload the driver: reboot, or stop what uses the GPUs and load the nvidia modules again"
            if loaded
            else "install the NVIDIA driver, then reboot"
        )
        state = "loaded" if loaded else "not loaded"
        yield error("the NVIDIA driver does not answer", why, f"the kernel module is {state}", mend=mend)
        return
    if not devices(facts):
        yield error("the driver shows no GPU", mend="look for Xid and NVRM lines in `dmesg`, and at the power cables")
        return
    module = gpu.at("module").maybe_text("version") if loaded else None
    driver = gpu.text("driver")
    if module is not None and module != driver:
        yield error(
            "the driver's kernel module and its libraries are of two versions",
            f"module {module}, libraries {driver}",
            mend="reboot, so that the installed module is loaded",
        )


@check("DD202")
def driver_age(facts: Facts) -> Iterator[Saying]:
    cuda = torch_cuda(facts)
    if cuda is None:
        return
    driver = facts.at("gpu").text("driver")
    for since, oldest in _DRIVERS:
        if cuda >= since:
            if dotted(driver, "gpu.driver") < dotted(oldest, ""):
                yield error(
                    f"driver {driver} is too old for CUDA {shown(cuda)}",
                    f"torch is built for CUDA {shown(cuda)}, which needs driver {oldest} or later",
                    mend="upgrade the driver, or install torch and kernels built for an older CUDA",
                )
            return


@check("DD203")
def open_modules(facts: Facts) -> Iterator[Saying]:
    if any(capability(device)[0] in BLACKWELL for device in devices(facts)):
        module = facts.at("gpu").at("module")
        if not module.flag("open"):
            yield error(
                "Blackwell GPUs need the open kernel modules",
                f"the loaded module {module.maybe_text('version') or ''} is the proprietary one".replace("  ", " "),
                mend="install the driver's -open variant, then reboot",
            )


@check("DD204")
def enough_gpus(facts: Facts) -> Iterator[Saying]:
    there = devices(facts)
    names = sorted({device.text("name") for device in there})
    if len(names) > 1:
        yield warning(
            "GPUs of different kinds", some(names), mend="list the GPUs of one kind in `gpus` of each service"
        )
    indexes = [device.integer("index") for device in there]
    for service in services(facts):
        size, listed = service.settings.tp, service.settings.gpus
        absent = [str(number) for number in listed[:size] if number not in indexes]
        if absent:
            yield error(
                f"{service.name}: GPU {some(absent)} is not there",
                f"the host has {len(there)} GPUs",
                mend="correct `gpus` of the service",
            )
        elif len(there) < size:
            yield error(
                f"{service.name}: needs {size} GPUs",
                f"the host has {len(there)}",
                mend="set `tp` of the service to what is there",
            )


@check("DD205")
def rendered_capability(facts: Facts) -> Iterator[Saying]:
    for service in services(facts):
        rendered = service.settings.compute_capability
        found = sorted({shown(capability(device)) for device in chosen(service, facts)})
        if found and found != [rendered]:
            yield error(
                f"{service.name}: rendered for compute capability {rendered}",
                f"its GPUs have {some(found)}",
                mend=f'set compute_capability = "{found[0]}" in the service',
            )


@check("DD206")
def torch_for_gpus(facts: Facts) -> Iterator[Saying]:
    cuda = torch_cuda(facts)
    found = sorted({capability(device) for device in devices(facts)})
    blackwell = [shown(item) for item in found if item[0] in BLACKWELL]
    if cuda is not None and blackwell and cuda < _BLACKWELL_CUDA:
        yield error(
            f"torch is built for CUDA {shown(cuda)}, which does not know compute capability {some(blackwell)}",
            "the engine then takes the GPUs for an older kind, too",
            mend=f"install torch built for CUDA {shown(_BLACKWELL_CUDA)} or later",
        )


@check("DD207")
def memory(facts: Facts) -> Iterator[Saying]:
    there = devices(facts)
    most: dict[str, float] = {}
    for device in there:
        most[device.text("name")] = max(most.get(device.text("name"), 0.0), device.number("memory_mib"))
    for device in there:
        name, size = device.text("name"), device.number("memory_mib")
        least = max((mib for known, mib in _MEMORY_MIB.items() if known in name), default=0)
        if size < max(least, 0.98 * most[name]):
            yield warning(
                f"GPU {device.integer('index')} ({name}) has less memory than its kind: {size:.0f} MiB",
                f"{max(least, most[name]):.0f} MiB are expected",
                mend="turn MIG off; look for retired pages in `nvidia-smi -q -d PAGE_RETIREMENT,ROW_REMAPPER`",
            )


@check("DD208")
def holders(facts: Facts) -> Iterator[Saying]:
    gpu = facts.at("gpu")
    held = gpu.items("holders")
    there = devices(facts)
    own = {service.unit for service in services(facts)}
    wanted = {device.text("uuid") for service in services(facts) for device in chosen(service, facts)}
    for holder in held:
        on, used = holder.maybe_text("gpu"), holder.maybe_number("used_mib")
        line = f"pid {holder.integer('pid')}: {holder.maybe_text('command') or 'of another user'}"
        amount = "" if used is None else f", {used:.0f} MiB"
        index = next((str(device.integer("index")) for device in there if device.text("uuid") == on), "?")
        what = f"GPU {index}{amount}"
        if holder.maybe_text("cgroup") in own:
            yield note("the service itself holds its GPUs", f"{line} ({what})")
        elif on is None or on in wanted:
            yield error(
                "another process holds a GPU that a service uses",
                f"{line} ({what})",
                mend="stop it, or give the service other GPUs: `gpus` in the inventory",
            )
        else:
            yield warning("a process holds a GPU", f"{line} ({what})", mend="stop it before a service uses that GPU")
    for device in there:
        used = device.number("used_mib")
        if used > _USED_MIB and not held:
            yield warning(
                f"GPU {device.integer('index')} has {used:.0f} MiB in use, and no process shows itself",
                mend="run the doctor as root (--sudo) to see other users' processes; a container's are hidden, too",
            )


@check("DD209")
def modes(facts: Facts) -> Iterator[Saying]:
    for device in devices(facts):
        index = device.integer("index")
        if device.maybe_text("mig") == "Enabled":
            yield error(f"GPU {index} is in MIG mode", mend=f"`nvidia-smi -i {index} -mig 0`, then reset the GPU")
        mode = device.maybe_text("compute_mode")
        if mode == "Prohibited":
            yield error(f"GPU {index} lets no process compute", mend=f"`nvidia-smi -i {index} -c DEFAULT`")
        elif mode is not None and mode != "Default":
            yield warning(
                f"GPU {index} takes one process alone (compute mode {mode})",
                "the engine has more than one on a GPU while it starts, and with a drafter"
                if any(service.settings.speculative for service in services(facts))
                else "the engine has more than one on a GPU while it starts",
                mend=f"`nvidia-smi -i {index} -c DEFAULT`",
            )


@check("DD210")
def memory_errors(facts: Facts) -> Iterator[Saying]:
    for device in devices(facts):
        count = device.maybe_number("ecc_uncorrected")
        if count:
            errors = plural(int(count), "uncorrected memory error")
            yield warning(
                f"GPU {device.integer('index')} has {errors} since the driver was loaded",
                mend="drain it and reset it; if they come back, have it replaced",
            )


@check("DD211")
def pcie_width(facts: Facts) -> Iterator[Saying]:
    narrow = []
    for device in devices(facts):
        width, most = device.maybe_number("pcie_width"), device.maybe_number("pcie_width_max")
        if width and most and width < min(most, _FULL_WIDTH):
            narrow.append(f"GPU {device.integer('index')}: x{width:.0f} of x{most:.0f}")
    if narrow:
        yield warning(
            "GPUs with part of their PCIe lanes",
            *narrow,
            mend="reseat the card or riser, and look at the slot's bifurcation in the BIOS",
        )


@check("DD212")
def persistence(facts: Facts) -> Iterator[Saying]:
    off = [str(device.integer("index")) for device in devices(facts) if device.maybe_text("persistence") == "Disabled"]
    if off:
        yield warning(
            f"persistence mode is off on GPU {some(off, 8)}",
            "the driver unloads when nobody uses a GPU, and loads again for every start",
            mend="`systemctl enable --now nvidia-persistenced`, or `nvidia-smi -pm 1`",
        )
