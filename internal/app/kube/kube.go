// Package kube marks nodes of a Kubernetes cluster as faulty, and takes the marks back. It speaks plain HTTPS with the
// service account of the pod that it runs in.
//
// Changes to a node are recorded on the node itself, in the annotation Key: a JSON object with one entry for each
// owner. Removing an entry undoes its changes, unless another entry records the same. Taints and cordons without an
// entry are not ours and stay as they are. The annotation and the recorded changes are written in one request that
// fails if the node has changed since it was read.
package kube

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"dlrover-run/internal/openfile"
)

const (
	// Key is the annotation and the taint of a marked node.
	Key = "dlrover/faulty"
	// ConditionType is the condition of a marked node, and the reason of the events about it.
	ConditionType = "DLRoverFaulty"
)

// Config holds the API server's address and the client's identity.
type Config struct {
	Server    string // https://HOST:PORT
	CAFile    string // certificates of authorities for the server, as PEM; read once; "": those of the system
	TokenFile string // read again when it is a minute old, or refused
	Namespace string // of the own pod, for events and Avoid; may be ""
	Pod       string // name of the own pod, for events and Avoid; may be ""
	Log       *slog.Logger
}

// ErrNotInCluster means that the process is in no pod with a service account.
var ErrNotInCluster = errors.New("not in a Kubernetes pod with a service account")

const serviceAccountDir = "/var/run/secrets/kubernetes.io/serviceaccount"

// DirVariable names the directory with token, ca.crt and namespace where a pod has them in a volume of its own.
const DirVariable = "DLROVER_SERVICE_ACCOUNT_DIR"

// InCluster is the configuration that Kubernetes gives every container. The error is ErrNotInCluster where there is
// none.
func InCluster() (Config, error) {
	return inCluster(os.LookupEnv, cmp.Or(os.Getenv(DirVariable), serviceAccountDir))
}

func inCluster(lookup func(string) (string, bool), dir string) (Config, error) {
	host, _ := lookup("KUBERNETES_SERVICE_HOST")
	port, _ := lookup("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return Config{}, fmt.Errorf("%w: no KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT", ErrNotInCluster)
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return Config{}, fmt.Errorf("KUBERNETES_SERVICE_PORT=%q: need a port, 1 to 65535", port)
	}
	c := Config{
		Server: "https://" + net.JoinHostPort(host, port), CAFile: filepath.Join(dir, "ca.crt"),
		TokenFile: filepath.Join(dir, "token"),
	}
	if _, err := os.Stat(c.TokenFile); err != nil {
		return Config{}, fmt.Errorf("%w (is automountServiceAccountToken off?): %w", ErrNotInCluster, err)
	}
	namespace, _ := openfile.ReadLinked(filepath.Join(dir, "namespace"), maxName) // for messages only
	c.Namespace = strings.TrimSpace(string(namespace))
	c.Pod, _ = lookup("POD_NAME")
	return c, nil
}

// Mark is an owner's statement that a node is faulty, and why. Times are kept to the second.
type Mark struct {
	Node     string    // name of the Kubernetes node
	Owner    string    // another owner's mark is not replaced; at most 253 printable bytes
	Reason   string    // one line; its part that is valid in a taint becomes the taint's value
	Evidence string    // measurements
	Since    time.Time // with Owner and Node, the identity of the event
	Until    time.Time // when the caller must remove the mark; zero: on request
}

// Bounds of a mark, in bytes. Longer texts are cut.
const (
	maxName     = 253
	maxReason   = 256
	maxEvidence = 1024
)

// checked is the mark as it is stored.
func (m Mark) checked() (Mark, error) {
	if err := checkNode(m.Node); err != nil {
		return m, err
	}
	if err := checkOwner(m.Owner); err != nil {
		return m, err
	}
	if m.Since.IsZero() || !m.Until.IsZero() && m.Until.Before(m.Since) {
		return m, fmt.Errorf("kube: mark of node %s is from %s until %s: need a beginning, and no end before it", m.Node,
			m.Since.Format(time.RFC3339), m.Until.Format(time.RFC3339))
	}
	m.Reason, m.Evidence = clean(m.Reason, maxReason), clean(m.Evidence, maxEvidence)
	m.Since, m.Until = m.Since.UTC().Truncate(time.Second), m.Until.UTC().Truncate(time.Second)
	return m, nil
}

// checkNode keeps anything but a DNS-1123 subdomain out of paths.
func checkNode(name string) error {
	bad := len(name) > maxName
	for label := range strings.SplitSeq(name, ".") {
		bad = bad || label == "" || label[0] == '-' || label[len(label)-1] == '-' ||
			strings.ContainsFunc(label, func(r rune) bool { return !isLower(r) && r != '-' })
	}
	if bad {
		return fmt.Errorf("kube: %.260q is not the name of a node: need a DNS-1123 subdomain, as in node-1.example: %w", name,
			ErrNotFound)
	}
	return nil
}

func checkOwner(owner string) error {
	if owner == "" || len(owner) > maxName || clean(owner, maxName) != owner {
		return fmt.Errorf("kube: owner %.260q of a mark: need 1 to %d printable bytes", owner, maxName)
	}
	return nil
}

func isLower(r rune) bool { return 'a' <= r && r <= 'z' || '0' <= r && r <= '9' }
