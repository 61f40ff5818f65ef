"""What a node can send by."""

from pathlib import Path

from mpistrat.machine.network_links import network_links


def test_speeds(tmp_path: Path) -> None:
    """Each once, whatever the devices are called; not of a link that is down."""
    files = {
        "net/eth0/speed": "25000\n",
        "net/eth1/speed": "25000\n",
        "net/eth2/speed": "-1\n",
        "net/lo/mtu": "65536\n",
        "infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
    }
    for name, text in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    (tmp_path / "net/lo/speed").mkdir()  # the kernel gives none, either: the file cannot be read
    assert network_links(str(tmp_path)) == ("200 Gb/sec (4X HDR)", "25000 Mb/s")
    assert network_links(str(tmp_path / "none")) == ()


def test_this_machine() -> None:
    links = network_links()
    assert links == tuple(sorted(set(links)))
    assert all(link.split()[1].startswith(("Mb/s", "Gb/sec")) for link in links)
