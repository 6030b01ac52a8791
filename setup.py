"Reads settings.ini, so that names, versions and dependencies stand in one place."
from configparser import ConfigParser
from setuptools import setup, find_packages

cp = ConfigParser(delimiters=["="])
cp.read("settings.ini", encoding="utf-8")
c = cp["DEFAULT"]
extras = {k.removesuffix("_requirements"): v.split() for k, v in c.items() if k.endswith("_requirements")}
setup(name=c["lib_name"], version=c["version"], description=c["description"], author=c["author"],
      author_email=c["author_email"], license="Apache-2.0", keywords=c["keywords"],
      python_requires=f">={c['min_python']}", long_description=open("README.md", encoding="utf-8").read(),
      long_description_content_type="text/markdown", packages=find_packages(include=["clvla", "clvla.*"]),
      include_package_data=False, install_requires=c["requirements"].split(), extras_require=extras,
      entry_points={"console_scripts": c["console_scripts"].split()})
