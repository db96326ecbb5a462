package kube_test

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"dlrover-run/internal/app/lease"
	"dlrover-run/internal/secure"
	"dlrover-run/launcher/policy"
)

// podSpec is what we check of a pod's template.
type podSpec struct {
	ShareProcessNamespace bool `yaml:"shareProcessNamespace"`
	InitContainers        []struct {
		Command, Args   []string
		RestartPolicy   string `yaml:"restartPolicy"`
		SecurityContext struct {
			RunAsUser *int `yaml:"runAsUser"`
		} `yaml:"securityContext"`
	} `yaml:"initContainers"`
	ServiceAccountName string `yaml:"serviceAccountName"`
	Automount          *bool  `yaml:"automountServiceAccountToken"`
	Containers         []struct {
		Command, Args []string
		Env           []struct {
			Name, Value string
			ValueFrom   struct {
				FieldRef struct {
					FieldPath string `yaml:"fieldPath"`
				} `yaml:"fieldRef"`
			} `yaml:"valueFrom"`
		}
		Resources struct {
			Limits struct{ Memory string }
		}
		VolumeMounts []struct {
			Name      string
			MountPath string `yaml:"mountPath"`
		} `yaml:"volumeMounts"`
	}
	Volumes []struct {
		Name   string
		Secret struct {
			SecretName string `yaml:"secretName"`
		}
	}
}

// spec unpacks one part of the only document of that kind.
func spec(t *testing.T, documents []document, kind string, into any, path ...string) {
	t.Helper()
	var found []document
	for _, d := range documents {
		if d.Kind == kind {
			found = append(found, d)
		}
	}
	require.Len(t, found, 1, kind)
	part := found[0].Spec
	for _, name := range path {
		part = part[name].(map[string]any)
	}
	text, err := yaml.Marshal(part)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(text, into))
}

// mounts are the paths at which a pod has volumes, by what the volume is of.
func (p podSpec) mounts() map[string]string {
	of := map[string]string{}
	for _, v := range p.Volumes {
		of[v.Name] = v.Secret.SecretName
	}
	paths := map[string]string{}
	for _, m := range p.Containers[0].VolumeMounts {
		paths[of[m.Name]] = m.MountPath
	}
	return paths
}

// env are a pod's variables, those of fields as $path.
func (p podSpec) env() map[string]string {
	env := map[string]string{}
	for _, v := range p.Containers[0].Env {
		env[v.Name] = v.Value
		if path := v.ValueFrom.FieldRef.FieldPath; path != "" {
			env[v.Name] = "$" + path
		}
	}
	return env
}

func TestManifestsOfMasterAndTrainingFitTogether(t *testing.T) {
	master := documents(t, "master.yaml")
	for _, d := range master {
		require.Equal(t, "default", d.Metadata.Namespace, d.Kind)
		require.Equal(t, "dlrover-master", d.Metadata.Name, d.Kind)
	}
	var daemon, worker podSpec
	spec(t, master, "Deployment", &daemon, "template", "spec")
	require.Equal(t, "dlrover-master", daemon.ServiceAccountName)
	require.Equal(t, map[string]string{"job-token": "/etc/dlrover"}, daemon.mounts(), "no volume of one node alone")
	c := daemon.Containers[0]
	require.Equal(t, []string{"dlrover-master"}, c.Command)
	require.Equal(t, []string{
		"--listen=:50001", "--token-file=/etc/dlrover/token", "--ha=lease", "--advertise=$(POD_IP):50001",
		"--node-action=event",
	}, c.Args)
	require.Equal(t, map[string]string{
		"POD_NAME": "$metadata.name", "POD_IP": "$status.podIP", "GOMEMLIMIT": "900MiB",
	}, daemon.env())
	require.Equal(t, "1Gi", c.Resources.Limits.Memory, "above GOMEMLIMIT")

	var service struct {
		Selector map[string]string
		Ports    []struct{ Port int }
	}
	var labels map[string]string
	spec(t, master, "Service", &service)
	spec(t, master, "Deployment", &labels, "template", "metadata", "labels")
	labels[lease.Label] = "true" // which the leader gives its pod
	require.Equal(t, labels, service.Selector)
	require.Equal(t, 50001, service.Ports[0].Port)

	spec(t, documents(t, "training-pod.yaml"), "Job", &worker, "template", "spec")
	require.Equal(t, "/etc/dlrover", worker.mounts()["job-token"])
	require.False(t, *worker.Automount)
	require.Equal(t, []string{"dlrover-run"}, worker.Containers[0].Command)
	require.Equal(t, map[string]string{
		"DLROVER_MASTER_ADDR": "dlrover-master:50001", "DLROVER_TOKEN_FILE": "/etc/dlrover/token",
		"NODE_NAME": "$spec.nodeName", "POD_NAME": "$metadata.name", "POD_IP": "$status.podIP",
	}, worker.env())
}

// The comment about TLS is of the same variable in the pods of the master and of the job.
func TestManifestsHaveTLSAsAComment(t *testing.T) {
	for name, kind := range map[string]string{"master.yaml": "Deployment", "training-pod.yaml": "Job"} {
		var plain, pod podSpec
		spec(t, documents(t, name), kind, &plain, "template", "spec")
		require.NotContains(t, plain.env(), secure.Variables[0])
		text := strings.Replace(manifest(t, name), "# - {name: DLROVER_TLS,", "- {name: DLROVER_TLS,", 1)
		spec(t, decoded(t, []byte(text)), kind, &pod, "template", "spec")
		want := plain.env()
		want[secure.Variables[0]] = "auto"
		require.Equal(t, want, pod.env(), name)
	}
}

func TestASidecarSeesTheProcessesOfTorchrun(t *testing.T) {
	var pod podSpec
	spec(t, documents(t, "torchrun-pod.yaml"), "Job", &pod, "template", "spec")
	require.True(t, pod.ShareProcessNamespace)
	side := pod.InitContainers[0]
	require.Equal(t, "Always", side.RestartPolicy, "else the pod waits for its end")
	require.Equal(t, []string{"checkpointd"}, side.Command)
	require.Contains(t, side.Args, "--hang=outside")
	require.Equal(t, 0, *side.SecurityContext.RunAsUser)
	require.Equal(t, []string{"torchrun"}, pod.Containers[0].Command)
}

// What a status of --exit-code-policy=reason leads to; a new pod for all others.
var (
	endsJob = []policy.Reason{
		policy.Usage, policy.WorkerFailed, policy.WorkerPermanent, policy.OutOfMemory, policy.RendezvousClosed,
		policy.TokenRefused, policy.CannotExecute, policy.LogDir, policy.SaveLost, policy.Hung, policy.Deadline,
		policy.NoFirstStep, policy.OperatorStop,
	}
	comesBack = []policy.Reason{
		policy.NodeLost, policy.RendezvousTimeout, policy.MasterUnreachable, policy.TooFewPassed,
		policy.Signaled(int(syscall.SIGKILL)),
	}
	newPod = []policy.Reason{policy.Unclassified, policy.NodeCheckFailed}
)

func joined(reasons []policy.Reason, separator string) string {
	var codes []string
	for _, r := range reasons {
		codes = append(codes, strconv.Itoa(int(r)))
	}
	return strings.Join(codes, separator)
}

func TestManifestsKnowEveryExitStatus(t *testing.T) {
	require.ElementsMatch(t, append(policy.Reasons(), policy.Signaled(int(syscall.SIGKILL))),
		slices.Concat([]policy.Reason{policy.Success}, endsJob, comesBack, newPod))
	ends := "action: FailJob  # a new pod would end in the same way: docs/reference/exit-codes.md\n" +
		" onExitCodes: {operator: In, values: [" + joined(endsJob, ", ") + "]}"
	back := "exitCodes: {operator: In, values: [" + joined(comesBack, ", ") + "]}"
	var volcano strings.Builder
	for _, r := range endsJob {
		fmt.Fprintf(&volcano, "- {exitCode: %d, action: TerminateJob}\n ", int(r))
	}
	for name, has := range map[string][]string{
		"training-pod.yaml":           {ends, back, "--exit-code-policy=reason"},
		"jobset.yaml":                 {ends, back, "--exit-code-policy=reason"},
		"trainjob.yaml":               {ends, back, "--exit-code-policy=reason"},
		"volcano-job.yaml":            {volcano.String(), back, "--exit-code-policy=reason"},
		"leaderworkerset.yaml":        {"0|" + joined(endsJob, "|") + ") sleep infinity", "--exit-code-policy=reason"},
		"pytorchjob.yaml":             {"restartPolicy: ExitCode", "--exit-code-policy=dlrover"},
		"../tasks/kubernetes-jobs.md": {"| " + joined(endsJob, ", ") + " |", "| " + joined(comesBack, ", ") + " |"},
	} {
		text := regexp.MustCompile(" +").ReplaceAllString(manifest(t, name), " ")
		for _, part := range has {
			require.Contains(t, text, strings.ReplaceAll(part, "  ", " "), name)
		}
	}
}
