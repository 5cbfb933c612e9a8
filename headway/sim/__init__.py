"""Floor 2: time. A Dag of operations, compiled kernels that replay it, and what-ifs on top.

>>> from headway.sim import Dag, replay
>>> replay(Dag.from_edges(2, [0], [1]), [3, 4]).makespan_ns
7
"""

from headway.sim.graph.attribution import attribute as attribute
from headway.sim.graph.attribution import critical_path as critical_path
from headway.sim.graph.attribution import slack as slack
from headway.sim.graph.dag import Dag as Dag
from headway.sim.graph.dag import ReplayTimes as ReplayTimes
from headway.sim.graph.dag import greedy as greedy
from headway.sim.graph.dag import replay as replay
