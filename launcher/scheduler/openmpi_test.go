package scheduler

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What mpirun of Open MPI 4.1.4 and 5.0.11 sets, as far as it is read.
const (
	openMPI4 = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=676462593 PMIX_RANK=0 " +
		"OMPI_MCA_orte_hnp_uri=676462592.0;tcp://192.0.2.2,10.0.0.2:37983;tcp6://[fd00::2]:58085 " +
		"PMIX_SERVER_URI41=676462592.0;tcp4://127.0.0.1:57195"
	openMPI5 = "OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=1 PRTE_LAUNCHED=1 PMIX_NAMESPACE=prterun-gpu-a-18493@1"

	daemon4 = "OMPI_MCA_orte_local_daemon_uri=676462592.0;tcp://192.0.2.2,10.0.0.2:37983;tcp6://[fd00::2]:58085"
	other4  = "OMPI_MCA_orte_local_daemon_uri=676462592.1;tcp://192.0.2.3:54709"
	daemon5 = "PMIX_SERVER_URI41=prterun-gpu-a-18493@0.0;tcp4://127.0.0.1:51913"
	other5  = "PMIX_SERVER_URI41=prterun-gpu-a-18493@0.1;tcp4://127.0.0.1:42855"
)

func TestOpenMPI(t *testing.T) {
	from4 := vars("OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_MCA_orte_hnp_uri " +
		"PMIX_NAMESPACE")
	from5 := vars("OMPI_COMM_WORLD_LOCAL_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE PMIX_NAMESPACE")
	mpi4 := Facts{Name: "mpi", Nodes: 2, MasterAddr: "192.0.2.2", MasterPort: 26595, RunID: "676462593", From: from4,
		nodesFrom: "$OMPI_COMM_WORLD_SIZE=2"}
	mpi5 := mpi4
	mpi5.MasterAddr, mpi5.MasterPort, mpi5.RunID, mpi5.From = "gpu-a", 28241, "prterun-gpu-a-18493@1", from5
	for name, c := range map[string]struct {
		variables []string
		rank      string
		want      Facts
		addr      string
	}{
		"4, on mpirun's host":             {append(vars(openMPI4), daemon4), "0", mpi4, "192.0.2.2"},
		"4, on another":                   {append(vars(openMPI4), other4), "1", mpi4, "192.0.2.2"},
		"4, and mpirun is elsewhere":      {append(vars(openMPI4), other4), "0", mpi4, ""},
		"5, on mpirun's host":             {append(vars(openMPI5), daemon5), "0", mpi5, "gpu-a"},
		"5, on another":                   {append(vars(openMPI5), other5), "1", mpi5, "gpu-a"},
		"5, and mpirun is elsewhere":      {append(vars(openMPI5), other5), "0", mpi5, ""},
		"5, in Slurm, by daemons of srun": {append(append(vars(slurmStep), vars(openMPI5)...), other5), "1", mpi5, "gpu-a"},
	} {
		f, err := Detect(Auto, system("a", 0, append(c.variables, "OMPI_COMM_WORLD_RANK="+c.rank)...))
		require.NoError(t, err, name)
		c.want.MasterAddr, c.want.NodeRank = c.addr, int(c.rank[0]-'0')
		require.Equal(t, c.want, f, name)
	}
	one := system("a", 0, append(vars(openMPI5), "OMPI_COMM_WORLD_SIZE=1", "OMPI_COMM_WORLD_RANK=0", daemon5)...)
	f, err := Detect(Auto, one)
	require.NoError(t, err)
	require.Empty(t, f.Name, "a single process trains alone")
	f, err = Detect("mpi", one)
	require.NoError(t, err)
	require.Equal(t, 1, f.Nodes)
	f, err = Detect(Auto, system("a", 0, append(vars(openMPI5), "OMPI_COMM_WORLD_RANK=1", "LOCAL_RANK=0")...))
	require.NoError(t, err)
	require.Empty(t, f.Name, "a worker of a launcher")
}

func TestAddressOfMpirun(t *testing.T) {
	for uri, want := range map[string]string{
		"1.0;tcp://127.0.0.1,10.1.2.3,10.9.9.9:57717":   "10.1.2.3",
		"1.0;tcp6://[::1,fd00::2]:5":                    "fd00::2",
		"1.0;tcp://127.0.0.1:5;tcp6://[fd00::2]:58085":  "fd00::2",
		"1.0;tcp://127.0.0.1:5":                         "",
		"1.0;tcp://:":                                   "",
		"1.0;usock;tcp://x:5,y:6;tcp://10.1.2.3,x:5,y:": "10.1.2.3",
		"": "",
	} {
		require.Equal(t, want, addressIn(uri), uri)
	}
}
