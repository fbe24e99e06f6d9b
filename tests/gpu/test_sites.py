import pytest

from ddtree_deploy.resources import patches_dir
from tests.gpu import sites

pytestmark = pytest.mark.wheel


@pytest.mark.parametrize("site", sites.SET_OF_SITE)
def test_a_site_is_the_published_one_but_for_its_sets(site, wheel_site, tmp_path):
    made = sites.make_site(site, wheel_site, patches_dir(), tmp_path / "site")
    changed = {
        path.relative_to(made).as_posix()
        for path in made.rglob("*.py")
        if not (wheel_site / path.relative_to(made)).exists()
        or path.read_bytes() != (wheel_site / path.relative_to(made)).read_bytes()
    }
    touched = {
        path for patch_set in sites.sets_of(site, patches_dir()) for path in patch_set.family_for(sites.ENGINE).paths
    }
    assert changed == touched


def test_the_digest_is_of_the_set_and_of_what_it_requires(monkeypatch):
    digest = sites.set_digest(patches_dir())
    monkeypatch.setitem(sites.SET_OF_SITE, "patched", "dflash-fixes")
    assert sites.set_digest(patches_dir()) != digest
