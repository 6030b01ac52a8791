"Reads settings.ini, so that names, versions and dependencies stand in one place; puts the experiment pages into the package."
from configparser import ConfigParser
from pathlib import Path
from shutil import copytree, copy2
from setuptools import setup, find_packages
from setuptools.command.build_py import build_py

cp = ConfigParser(delimiters=["="])
cp.read("settings.ini", encoding="utf-8")
c = cp["DEFAULT"]
extras = {k.removesuffix("_requirements"): v.split() for k, v in c.items() if k.endswith("_requirements")}


class WithPages(build_py):
    "An installed clvla has the pages and the parameters files of the published tables beside its modules, and needs no repository."
    def run(self):
        super().run()
        if self.editable_mode: return   # it finds them in nbs/
        pages = Path(self.build_lib)/c["lib_name"]/"pages"
        pages.mkdir(parents=True, exist_ok=True)
        for name in ("run_cl", "run_rl", "run_crl", "eval_cl", "compare", "audit", "sweep"): copy2(f"{c['nbs_path']}/{name}.ipynb", pages)
        copytree(f"{c['nbs_path']}/protocols", pages/"protocols", dirs_exist_ok=True)


setup(cmdclass={"build_py": WithPages}, name=c["lib_name"], version=c["version"], description=c["description"], author=c["author"],
      author_email=c["author_email"], license="Apache-2.0", keywords=c["keywords"],
      python_requires=f">={c['min_python']}", long_description=open("README.md", encoding="utf-8").read(),
      long_description_content_type="text/markdown", packages=find_packages(include=["clvla", "clvla.*"]),
      include_package_data=False, install_requires=c["requirements"].split(), extras_require=extras,
      entry_points={"console_scripts": c["console_scripts"].split()})
