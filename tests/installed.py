"""Checks of an installed package: it runs the code of pages, knows its version, and is typed. `.ci/package` runs this
outside of the checkout, with the checkout's folder and the pages as arguments. Only the package and its requirements
are installed."""

import importlib.metadata
import importlib.resources
import pathlib
import re
import sys


def main(checkout: pathlib.Path, *pages: str) -> None:
    for page in pages:
        text = (checkout / page).read_text(encoding="utf-8")
        names = {"__name__": "page"}
        for code in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            exec(compile(code, page, "exec"), names)
    import jax_splitk  # noqa: PLC0415

    problems = []
    if pathlib.Path(jax_splitk.__file__).is_relative_to(checkout):
        problems.append(f"{jax_splitk.__file__} is the checkout's, not what was installed")
    metadata = importlib.metadata.metadata("jax_splitk")
    if metadata["Version"] != jax_splitk.__version__:
        problems.append(f"version {metadata['Version']} in the metadata, {jax_splitk.__version__} in the package")
    text = metadata.get_payload()
    if not isinstance(text, str) or "](" in text or "quantized_matmul" not in text:
        problems.append("the description has links, which would lead nowhere on an index, or is not there")
    if not importlib.resources.files("jax_splitk").joinpath("py.typed").is_file():
        problems.append("py.typed is missing")
    for folder in ("kernels/cost_models", "kernels/device", "tables/nvidia_h200"):
        if not importlib.resources.files("jax_splitk").joinpath(folder).is_dir():
            problems.append(f"{folder} is missing")
    if problems:
        sys.exit("\n".join(problems))
    print(
        f"jax_splitk {jax_splitk.__version__}, installed in {jax_splitk.__file__}, runs the code of {', '.join(pages)}"
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
